"use strict";

/* Numbers as people read them, and the places of ticks on an axis. */

function shownNumber(value, digits = 4) {
  if (value === null || value === undefined) return "nan";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(digits)));
}

function shownDuration(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const whole = Math.round(seconds), hours = Math.floor(whole / 3600);
  const two = (number) => String(number).padStart(2, "0");
  return `${hours}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
}

/** Return the round distance that cuts an extent into about so many parts. */
function roundStep(extent, parts) {
  const rough = extent / Math.max(1, parts), power = 10 ** Math.floor(Math.log10(rough));
  const factor = [10, 5, 2, 1].find((one) => rough / power >= one / Math.SQRT2) ?? 1;
  return factor * power;
}

function linearTicks([low, high], parts, smallest = 0) {
  const step = Math.max(smallest, roundStep(high - low, parts));
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-9; number++) {
    ticks.push({ value: number * step, label: tickLabel(number * step, step, decimals) });
  }
  return ticks;
}

function tickLabel(value, step, decimals) {
  const largest = Math.max(Math.abs(value), step);
  if (value === 0) return "0";
  return decimals > 4 || largest >= 1e5 ? shownNumber(value, 3) : value.toFixed(decimals);
}

/** Return powers of ten with as many steps between them as there is room for. */
function logTicks([low, high], parts) {
  const decades = Math.log10(high / low);
  if (decades < 0.7) return linearTicks([low, high], parts);
  const factors = decades <= parts / 3 ? [1, 2, 5] : [1], every = Math.ceil(decades / parts);
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    if (power % every) continue;
    for (const factor of factors) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) ticks.push({ value, label: shownNumber(value, 3) });
    }
  }
  return ticks;
}

/** Return the extent of values with some air around it; a single value gets an extent of its own. */
function paddedExtent(values, isLog) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low > high) return isLog ? [0.1, 1] : [0, 1];
  if (isLog) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.05, high * (high / low) ** 0.05];
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
  const air = (high - low) * 0.06;
  return [low >= 0 && low < air * 2 ? 0 : low - air, high + air];
}

/** Return the index of the entry of sorted numbers that is nearest to a number. */
function nearestIndex(numbers, wanted) {
  let low = 0, high = numbers.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - numbers[low - 1] <= numbers[low] - wanted ? low - 1 : low;
}
