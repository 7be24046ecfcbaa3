"""Make docs/images/tensorboard.png, the README's picture: TensorBoard's custom-scalars page of the demo's run.

    python docs/picture.py runs/demo docs/images/tensorboard.png

Needs Chromium. The page would show a chart for every metric; four of them are copied to a run of their own first, so
that they fit a picture.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

METRICS = ("V_W_over_V_unbiased", "anisotropy", "M_over_Q", "intrinsic_dimension")
PORT = 6123
HEADLESS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --window-size=1060,740 --virtual-time-budget=60000"
)


def copy_run(history: Path, folder: Path) -> None:
    """Write the four metrics of a demo's history as a TensorBoard run of their own."""
    records = pd.read_parquet(history)
    with SummaryWriter(str(folder)) as writer:
        layout = {metric: ["Multiline", [rf"^geometry\.{metric}\/"]] for metric in METRICS}
        writer.add_custom_scalars({"geometry": layout})
        for step, layer, metric, value in records[["step", "layer", "metric", "value"]].itertuples(index=False):
            if metric in METRICS and (metric != "intrinsic_dimension" or layer != "embed"):  # far above the others
                writer.add_scalar(f"geometry.{metric}/{layer}", value, step)


def take_picture(logdir: Path, out: Path, profile: Path) -> None:
    """Save TensorBoard's custom-scalars page as it looks in Chromium."""
    server = subprocess.Popen(
        [Path(sys.executable).with_name("tensorboard"), "--logdir", logdir, "--host", "127.0.0.1", "--port", str(PORT)]
    )
    try:
        time.sleep(20)
        url = f"http://127.0.0.1:{PORT}/#custom_scalars&_smoothingWeight=0"
        arguments = [*HEADLESS.split(), f"--user-data-dir={profile}", f"--screenshot={out}", url]
        subprocess.run(["chromium", *arguments], check=True, timeout=120)
    finally:
        server.terminate()
    Image.open(out).convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(out, optimize=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_run(Path(sys.argv[1]) / "history.parquet", folder / "demo" / "training")
        take_picture(folder / "demo", Path(sys.argv[2]).absolute(), folder / "profile")
