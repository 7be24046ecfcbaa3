"""Make the README's pictures of a demo's run: two pages of TensorBoard, and figures of the report.

    python docs/picture.py runs/demo docs/images

Needs Chromium. The pages would show a chart for every metric; some are copied to a run of their own first, so that
they fit a picture.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from embedgeo.report.live import TensorBoardPictures
from embedgeo.results.events import custom_scalars_layout

METRICS = ("V_W_over_V_unbiased", "anisotropy", "M_over_Q", "intrinsic_dimension")
FIGURES = ("M_over_Q-dynamics", "V_W_over_V_unbiased-profile")
PORT = 6123
HEADLESS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=60000"
)


def copy_run(history: Path, folder: Path) -> None:
    """Write the four metrics of a demo's history as a TensorBoard run of their own."""
    records = pd.read_parquet(history)
    records = records[records["metric"].isin(METRICS)]
    with SummaryWriter(str(folder)) as writer:
        writer.add_custom_scalars(custom_scalars_layout(METRICS))
        for step, layer, metric, value in records[["step", "layer", "metric", "value"]].itertuples(index=False):
            if metric != "intrinsic_dimension" or layer != "embed":  # far above the others
                writer.add_scalar(f"geometry.{metric}/{layer}", value, step)
        TensorBoardPictures().write([writer], records.to_dict("records"))


def take_pictures(logdir: Path, out: Path, profile: Path) -> None:
    """Save TensorBoard's pages of custom scalars and of images as they look in Chromium."""
    command = [Path(sys.executable).absolute().with_name("tensorboard"), "--logdir", logdir.name, "--port", str(PORT)]
    server = subprocess.Popen([*command, "--host", "127.0.0.1"], cwd=logdir.parent)
    try:
        time.sleep(20)
        for name, page, height in (
            ("tensorboard", "custom_scalars&_smoothingWeight=0", 740),
            ("tensorboard-images", "images", 870),
        ):
            arguments = [*HEADLESS.split(), f"--user-data-dir={profile}", f"--window-size=1060,{height}"]
            url = f"http://127.0.0.1:{PORT}/#{page}"
            subprocess.run(["chromium", *arguments, f"--screenshot={out / name}.png", url], check=True, timeout=120)
            with Image.open(out / f"{name}.png") as image:
                save(image, out / f"{name}.png")
    finally:
        server.terminate()


def put_beside(figures: list[Path], out: Path) -> None:
    """Put figures of the same size into one picture, from left to right."""
    images = [Image.open(path).convert("RGB") for path in figures]
    whole = Image.new("RGB", (sum(image.width for image in images), images[0].height), "white")
    for i, image in enumerate(images):
        whole.paste(image, (i * image.width, 0))
    save(whole, out)


def save(image: Image.Image, path: Path) -> None:
    """Write a PNG of few colours, which is small."""
    image.convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(path, optimize=True)


if __name__ == "__main__":
    demo, images = Path(sys.argv[1]), Path(sys.argv[2]).absolute()
    put_beside([demo / "sweep" / "report" / "figures" / f"{name}.png" for name in FIGURES], images / "report.png")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_run(demo / "history.parquet", folder / "demo" / "training")
        take_pictures(folder / "demo", images, folder / "profile")
