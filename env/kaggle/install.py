# Installs what is missing here, from the attached dataset or else by network; replaces nothing.
import importlib.metadata
import subprocess
import sys
from pathlib import Path

names = ["polykv-lib"]  # the export names the others too
here = {d.name.lower().replace("_", "-") for d in importlib.metadata.distributions()}
wheels = Path("/kaggle/input").rglob("*.whl")
files = {wheel.name.split("-")[0].lower().replace("_", "-"): wheel for wheel in wheels}
if "polykv-lib" not in {*here, *files}:
    raise SystemExit("Attach the dataset that holds the wheel of polykv-lib, then run again.")
wanted = [str(files.get(name, name)) for name in names if name not in here]
pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *wanted]
if wanted and (done := subprocess.run(pip, capture_output=True, text=True)).returncode:
    raise SystemExit(f"pip could not install {', '.join(wanted)}: {done.stderr.strip()}")
print("installed:", ", ".join(Path(name).name for name in wanted) or "nothing, all is here")
