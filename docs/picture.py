"""Make the README's pictures of a demo's run: what the loggers get, TensorBoard's pages, two
figures of the report.

    python docs/picture.py runs/demo docs/images

Needs Chromium.
"""

import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
from dark import save
from PIL import Image

from embedgeo.drawing import png, resized, style
from embedgeo.report.figures import dynamics
from embedgeo.report.runs import runs_of_records

CURVES = ("V_W_over_V_unbiased", "anisotropy", "intrinsic_dimension_between")
PAGES = {
    "tensorboard": ("images", 615),
}
"""Name of the picture: page, and height of the window."""

FIGURES = ("M_over_Q-dynamics", "V_W_over_V_unbiased-profile")
PORT = 6123
HEADLESS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --force-device-scale-factor=2 "
    "--virtual-time-budget=60000"
)


def draw_curves(demo: Path) -> list[Image.Image]:
    """The monitor's curves of some metrics, as loggers get them."""
    (run,) = runs_of_records(pd.read_parquet(demo / "history.parquet"))
    with style(), resized(3.5, 3.3):
        pictures = [png(dynamics(run, metric).figure)[0] for metric in CURVES]
    return [Image.open(io.BytesIO(picture)) for picture in pictures]


def take_pictures(demo: Path, out: Path, profile: Path) -> None:
    """Save TensorBoard's pages of the monitored run as they look in Chromium, at twice the size."""
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        "tensorboard",
        "--port",
        str(PORT),
    ]
    server = subprocess.Popen([*command, "--host", "127.0.0.1"], cwd=demo)
    try:
        time.sleep(20)
        for name, (page, height) in PAGES.items():
            arguments = [
                *HEADLESS.split(),
                f"--user-data-dir={profile}",
                f"--window-size=1060,{height}",
            ]
            url = f"http://127.0.0.1:{PORT}/#{page}"
            subprocess.run(
                ["chromium", *arguments, f"--screenshot={out / name}.png", url],
                check=True,
                timeout=120,
            )
            with Image.open(out / f"{name}.png") as image:
                save(image, out / f"{name}.png")
    finally:
        server.terminate()


def put_beside(images: list[Image.Image], out: Path) -> None:
    """Put images of the same size into one picture, from left to right."""
    whole = Image.new("RGB", (sum(image.width for image in images), images[0].height), "white")
    for i, image in enumerate(images):
        whole.paste(image.convert("RGB"), (i * image.width, 0))
    save(whole, out)


if __name__ == "__main__":
    demo, images = Path(sys.argv[1]), Path(sys.argv[2]).absolute()
    put_beside(draw_curves(demo), images / "curves.png")
    figures = demo / "sweep" / "report" / "figures"
    put_beside([Image.open(figures / f"{name}.png") for name in FIGURES], images / "report.png")
    with tempfile.TemporaryDirectory() as profile:
        take_pictures(demo, images, Path(profile))
