"""The other half that Triton wants of a backend; an interpreted kernel never gets here."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend, GPUTarget


def _nothing_to_compile() -> NoReturn:
    raise NotImplementedError("this backend compiles nothing: set TRITON_INTERPRET=1")


class NoCompiler(BaseBackend):
    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        return "brainpatch-triton-cpu"

    def get_module_map(self) -> dict[str, Any]:
        return {}

    def parse_options(self, options: dict[str, Any]) -> object:
        _nothing_to_compile()

    def add_stages(self, stages: dict[str, Any], options: object, language: object) -> None:
        _nothing_to_compile()

    def load_dialects(self, context: object) -> None:
        _nothing_to_compile()
