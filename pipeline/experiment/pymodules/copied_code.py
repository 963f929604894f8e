"""Code of the frozen copy under the name of the author's own file, for as long as the two are the same."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


class CopyFinder(MetaPathFinder):
    """Finds the modules of one private package, which are read from the copy.

    Tracebacks and breakpoints go by the file name inside compiled code. With the name of the original, a breakpoint
    that an author sets there is hit also after a resume. Once the original was edited, its lines say something else,
    and the copy goes by its own name.
    """

    def __init__(self, package: str, copy: Path, original: Path) -> None:
        self._prefix = f"{package}."
        self._copy = copy
        self._original = original

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader) and spec.origin:
            relative = Path(spec.origin).relative_to(self._copy)
            spec.loader = _CopyLoader(fullname, spec.origin, self._original / relative)
        return spec


class _CopyLoader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, original: Path) -> None:
        super().__init__(fullname, path)
        self._original = original

    def source_to_code(self, data, path, *, _optimization=-1) -> CodeType:  # type: ignore[no-untyped-def, override]
        try:
            is_same = self._original.read_bytes() == data
        except OSError:
            is_same = False
        code: CodeType = super().source_to_code(data, str(self._original) if is_same else path)
        return code
