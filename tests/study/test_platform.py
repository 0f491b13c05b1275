"""Platforms, faked: what Kaggle, Colab and this machine's hardware make the study do."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from polykv_lib.study import platform
from polykv_lib.study.platform import Gpu, Places, PlatformError

T4 = Gpu(name="Tesla T4", capability=(7, 5), memory_mib=15360)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [
        n for n in os.environ if n.startswith(("COLAB_", "KAGGLE_", "HF_", "TRANSFORMERS_"))
    ]:
        monkeypatch.delenv(name)
    for name in (*platform.OFFLINE, *platform.QUIET):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    return monkeypatch


def test_each_platform_is_known_by_what_it_sets_itself(plain: pytest.MonkeyPatch) -> None:
    assert platform.kind() == "local"
    plain.setenv("COLAB_RELEASE_TAG", "x")
    assert platform.kind() == "colab"
    plain.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert platform.kind() == "kaggle"
    plain.delenv("KAGGLE_KERNEL_RUN_TYPE")
    plain.setenv("KAGGLE_URL_BASE", "x")
    assert platform.kind() == "kaggle"


def test_results_of_attached_kernels_are_read_wherever_output_goes(
    plain: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mounts = [
        tmp_path / name / "data" / "results"
        for name in ("earlier", "notebooks/me/earlier", "datasets/me/d/sub")
    ]
    for mount in mounts[:2]:
        mount.mkdir(parents=True)
    (mounts[2].parent / "runs").mkdir(parents=True)  # nothing but parts of a point
    (tmp_path / "other" / "data" / "texts").mkdir(parents=True)
    plain.setattr(platform, "KAGGLE_INPUT", tmp_path)
    assert Places.at("out").earlier == ()
    plain.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert Places.at("out").earlier == tuple(mounts)
    assert Places.at().earlier[1:] == tuple(mounts)


def test_places_are_the_same_from_any_folder(plain: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    plain.chdir(tmp_path)
    assert Places.at().results == root / "data" / "results"
    assert Places.at("out").results == tmp_path / "out" / "data" / "results"
    assert Places.at("out").papers == root / "data" / "papers"
    plain.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert Places.at().base == Path("/kaggle/working")
    assert Places.at().earlier == (root / "data" / "results",)


def test_a_folder_that_cannot_be_written_is_refused_before_compute(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        PlatformError, match=r"cannot write results to .*file/x \(.*\); set OUT_DIR or --out to a"
    ):
        platform.check_writable(tmp_path / "file" / "x")
    platform.check_writable(tmp_path / "new" / "folder")


def test_the_embedded_model_asks_for_no_network(plain: pytest.MonkeyPatch) -> None:
    plain.setattr(platform, "hub_reachable", lambda: pytest.fail("it reached for the network"))
    assert platform.set_environment("smollm2-135m")
    assert {os.environ[name] for name in platform.OFFLINE} == {"1"}
    assert os.environ["TQDM_DISABLE"] == "1"


def test_other_models_go_offline_only_without_a_network(plain: pytest.MonkeyPatch) -> None:
    assert not platform.hub_reachable(), "tests run without a network"
    plain.setattr(platform, "hub_reachable", lambda: True)
    plain.setenv("HF_TOKEN", "t")
    assert not platform.set_environment("meta-llama/Meta-Llama-3-8B-Instruct")
    assert "HF_HUB_OFFLINE" not in os.environ
    plain.setattr(platform, "hub_reachable", lambda: False)
    assert platform.set_environment("meta-llama/Meta-Llama-3-8B-Instruct")


def test_a_secret_is_looked_for_and_never_required(plain: pytest.MonkeyPatch) -> None:
    assert platform.secret("HF_TOKEN") is None
    plain.setenv("KAGGLE_KERNEL_RUN_TYPE", "Batch")
    assert platform.secret("HF_TOKEN") is None, "Kaggle without its module"
    secrets: Any = ModuleType("kaggle_secrets")
    secrets.UserSecretsClient = lambda: SimpleNamespace(get_secret=lambda name: f"{name} of Kaggle")
    plain.setitem(sys.modules, "kaggle_secrets", secrets)
    assert platform.secret("HF_TOKEN") == "HF_TOKEN of Kaggle"
    plain.setenv("HF_TOKEN", "mine")
    assert platform.secret("HF_TOKEN") == "mine"


def test_colab_gives_its_secret_or_times_out(plain: pytest.MonkeyPatch) -> None:
    def timed_out(name: str) -> str:
        raise TimeoutError(f"{name}: no answer from the browser")

    userdata: Any = ModuleType("google.colab.userdata")
    userdata.get = lambda name: f"{name} of Colab"
    plain.setenv("COLAB_RELEASE_TAG", "x")
    plain.setitem(sys.modules, "google.colab.userdata", userdata)
    assert platform.secret("HF_TOKEN") == "HF_TOKEN of Colab"
    userdata.get = timed_out
    assert platform.secret("HF_TOKEN") is None


def test_gpus_are_read_from_the_driver_without_torch(plain: pytest.MonkeyPatch) -> None:
    plain.setattr(platform.shutil, "which", lambda _: None)
    assert platform.gpus() == ()
    answer = SimpleNamespace(returncode=0, stdout="Tesla T4, 7.5, 15360\nTesla T4, 7.5, 15360\n")
    plain.setattr(platform.shutil, "which", lambda _: "nvidia-smi")
    plain.setattr(platform.subprocess, "run", lambda *_, **__: answer)
    assert platform.gpus() == (T4, T4)
    assert platform.default_profile(()) == "offline"
    assert platform.default_profile((T4, T4)) == "t4"
    assert platform.default_profile((Gpu(name="L4", capability=(8, 9), memory_mib=1),)) == "gpu"


def fake_gpu(
    patch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], *built: str
) -> None:
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_name", lambda: name)
    patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    patch.setattr(torch.cuda, "get_arch_list", lambda: list(built))


def test_a_gpu_that_torch_was_not_built_for_is_named(plain: pytest.MonkeyPatch) -> None:
    fake_gpu(plain, "Tesla P100", (6, 0), "sm_75", "sm_80", "sm_90a", "compute_90")
    with pytest.raises(
        PlatformError, match=r"Tesla P100 is sm_60, this torch serves sm_75, .*; choose another"
    ):
        platform.check_gpu()


def test_a_gpu_that_cannot_multiply_is_named(plain: pytest.MonkeyPatch) -> None:
    fake_gpu(plain, "Tesla T4", (7, 5), "sm_75")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image is available\nmore")

    plain.setattr(torch, "ones", broken)
    with pytest.raises(
        PlatformError,
        match=r"Tesla T4 \(sm_75\) fails at a 2 x 2 product: no kernel image is available; ",
    ):
        platform.check_gpu()


@pytest.mark.parametrize(
    ("target", "capability", "covers"),
    [
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),
        ("compute_90", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_120", (12, 0), True),
    ],
)
def test_which_builds_run_on_which_gpu(
    target: str, capability: tuple[int, int], covers: bool
) -> None:
    assert platform._covers(target, capability) is covers


@pytest.mark.parametrize(
    "module",
    [
        "notebook",
        "params",
        "grid",
        "run",
        "cli",
        "store",
        "index",
        "doctor",
        "tables",
        "figures",
        "estimate",
        "kaggle",
        "cluster",
    ],
)
def test_the_study_imports_no_torch(module: str) -> None:
    code = f"import sys, polykv_lib.study.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
