"""The promises that depend on a device, tried on whatever device this machine has."""
