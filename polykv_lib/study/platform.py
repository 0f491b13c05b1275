"""Where the study runs: Kaggle, Colab or local; its folders, network, secrets, accelerator."""

import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

EMBEDDED_MODEL = "smollm2-135m"
KAGGLE_INPUT, KAGGLE_OUTPUT = Path("/kaggle/input"), Path("/kaggle/working")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


class PlatformError(RuntimeError):
    """Something about this machine that stops the study; the text is one line."""


Kind = Literal["kaggle", "colab", "local"]


def kind() -> Kind:
    """The platform, by what each one sets itself (folders such as /content prove nothing)."""
    if {"KAGGLE_KERNEL_RUN_TYPE", "KAGGLE_URL_BASE"} & os.environ.keys():
        return "kaggle"
    if "google.colab" in sys.modules or any(name.startswith("COLAB_") for name in os.environ):
        return "colab"
    return "local"


def repository() -> Path | None:
    """The checkout this library is imported from; None if it was installed without one."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "notebooks").is_dir() and (root / "pyproject.toml").is_file() else None


@dataclass(frozen=True, kw_only=True)
class Places:
    """The study's folders: everything is written below `base`, and read below it first."""

    base: Path
    earlier: tuple[Path, ...] = ()  # results folders of earlier runs, never written

    @classmethod
    def at(cls, out_dir: str = "") -> "Places":
        """Below `out_dir`; if empty, below the checkout, or Kaggle's output folder on Kaggle.

        On Kaggle, the results of attached kernels and datasets count as earlier ones.
        """
        root, on_kaggle = repository(), kind() == "kaggle"
        attached = _attached_results() if on_kaggle else ()
        if out_dir:
            return cls(base=Path(out_dir).expanduser().resolve(), earlier=attached)
        if on_kaggle:
            own = (root / "data" / "results",) if root else ()
            return cls(base=KAGGLE_OUTPUT, earlier=(*own, *attached))
        return cls(base=root or Path.cwd())

    @property
    def results(self) -> Path:
        return self.base / "data" / "results"

    @property
    def runs(self) -> Path:
        return self.base / "data" / "runs"

    @property
    def figures(self) -> Path:
        return self.base / "figures"

    @property
    def papers(self) -> Path:
        """The published numbers, which come with the checkout."""
        return (repository() or self.base) / "data" / "papers"


def _attached_results() -> tuple[Path, ...]:
    """`data/results` in each mount: `<slug>/`, `notebooks/<owner>/<slug>/`, or a folder deeper.

    Also where only `data/runs` is there: an output keeps no empty folders.
    """
    depths = ("*/" * depth + "data" for depth in range(1, 5))
    found = [path for pattern in depths for path in sorted(KAGGLE_INPUT.glob(pattern))]
    return tuple(
        data / "results" for data in found if any((data / n).is_dir() for n in ("results", "runs"))
    )


def check_writable(folder: Path) -> None:
    """Makes a folder and a file in it, before anything is computed.

    Raises:
        PlatformError: it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = error.strerror or error
        raise PlatformError(
            f"cannot write results to {folder} ({reason}); "
            "set OUT_DIR or --out to a folder you may write"
        ) from None


def set_environment(model: str) -> bool:
    """Silences progress bars, and goes offline when the model needs no network or there is none.

    Call it before anything imports a Hugging Face library: they read these variables once.

    Returns:
        Whether this run is offline.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    offline = model == EMBEDDED_MODEL or os.environ.get(OFFLINE[0]) == "1" or not hub_reachable()
    if offline:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))
    elif token := secret("HF_TOKEN"):
        os.environ["HF_TOKEN"] = token
    return offline


def hub_reachable(timeout_s: float = 3.0) -> bool:
    """Whether the model hub answers a TCP connection."""
    url = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        port = url.port or (80 if url.scheme == "http" else 443)
        socket.create_connection((url.hostname or "", port), timeout=timeout_s).close()
    except OSError:
        return False
    return True


def secret(name: str) -> str | None:
    """A secret from the environment, else from Kaggle's or Colab's own store, else None."""
    if value := os.environ.get(name):
        return value
    try:
        match kind():
            case "kaggle":
                client = importlib.import_module("kaggle_secrets").UserSecretsClient()
                return client.get_secret(name) or None
            case "colab":
                return importlib.import_module("google.colab.userdata").get(name) or None
    except Exception:  # not attached, not granted, timed out: each platform raises its own
        return None
    return None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as its driver reports it; `capability` as (major, minor)."""

    name: str
    capability: tuple[int, int]
    memory_mib: int


def gpus() -> tuple[Gpu, ...]:
    """The GPUs of this machine, asked of nvidia-smi so that torch need not be imported."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = "--query-gpu=name,compute_cap,memory.total"
    answer = subprocess.run(
        [command, query, "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    lines = answer.stdout.splitlines() if answer.returncode == 0 else []
    return tuple(_gpu(line) for line in lines if line.count(",") == 2)


def _gpu(line: str) -> Gpu:
    name, capability, memory = (part.strip() for part in line.split(","))
    major, minor = capability.split(".")
    return Gpu(name=name, capability=(int(major), int(minor)), memory_mib=int(memory))


def default_profile(found: tuple[Gpu, ...]) -> str:
    """The results folder of PROFILE="auto": "offline" without a GPU, "t4" on a T4, else "gpu"."""
    if not found:
        return "offline"
    return "t4" if found[0].capability == (7, 5) else "gpu"


def check_gpu() -> str:
    """Proves that torch can compute on the GPU, with one small product.

    Returns:
        "cpu" where torch sees no GPU, else "cuda".

    Raises:
        PlatformError: torch sees a GPU that its build has no kernels for.
    """
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    capability, built = torch.cuda.get_device_capability(), torch.cuda.get_arch_list()
    name, arch = torch.cuda.get_device_name(), "sm_{}{}".format(*capability)
    advice = "choose another accelerator, or set CUDA_VISIBLE_DEVICES='' to run on the CPU"
    if not any(_covers(target, capability) for target in built):
        raise PlatformError(f"{name} is {arch}, this torch serves {', '.join(built)}; {advice}")
    try:
        torch.ones(2, 2, device="cuda").mm(torch.ones(2, 2, device="cuda")).sum().item()
    except RuntimeError as error:
        said = str(error).splitlines()[0]
        raise PlatformError(f"{name} ({arch}) fails at a 2 x 2 product: {said}; {advice}") from None
    return "cuda"


def _covers(target: str, capability: tuple[int, int]) -> bool:
    """Whether code built for "sm_80" or "compute_90" runs on a GPU of this capability."""
    form, _, digits = target.rstrip("af").partition("_")
    major, minor = int(digits[:-1]), int(digits[-1])
    if form == "compute":  # PTX, compiled on loading for anything newer
        return (major, minor) <= capability
    return major == capability[0] and minor <= capability[1]


def lacks_avx512() -> bool:
    """Whether this is an x86 CPU whose flags name no AVX-512; False where the system does not say.

    Matrix products in fp32 are two to three times slower there.
    """
    flags = cpu_field("flags")
    return flags is not None and "avx512f" not in flags.split()


def cpu_field(name: str) -> str | None:
    """What Linux says of the first core under a name such as "model name"; None elsewhere."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
