"""Make the pictures of a demo's run: its story, what the loggers get, TensorBoard's page, the
report's first screen and two figures of it.

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
from matplotlib.figure import Figure
from PIL import Image

from embedgeo.drawing import depth_colours, png, resized, step_axis, style
from embedgeo.glossary import term
from embedgeo.report.figures import dynamics
from embedgeo.report.runs import read_folder, runs_of_records

STORY = ("V_W_over_V_unbiased", "M_over_Q")
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
    """The monitor's curves of some metrics."""
    (run,) = runs_of_records(pd.read_parquet(demo / "history.parquet"))
    with style(), resized(3.5, 3.3):
        pictures = [png(dynamics(run, metric).figure)[0] for metric in CURVES]
    return [Image.open(io.BytesIO(picture)) for picture in pictures]


def draw_story(demo: Path) -> Image.Image:
    """The held-out loss above V_W / V and M / Q, a line a block, against the step."""
    (run,) = runs_of_records(pd.read_parquet(demo / "history.parquet"))
    (swept,) = read_folder(demo / "sweep")
    with style():
        figure = Figure(figsize=(7, 5.4), layout="constrained")
        axes = figure.subplots(3, 1, sharex=True)
        axes[0].plot(swept.of_model("loss"), color="black", marker="o", markersize=3)
        axes[0].set_title("held-out loss, nats a token", loc="left")
        colours = depth_colours(len(run.all_blocks))
        for ax, metric in zip(axes[1:], STORY, strict=True):
            for block, colour in zip(run.all_blocks, colours, strict=True):
                ax.plot(run.table(metric)[block], color=colour, label=block)
            ax.set_title(f"{term(metric).name}, {term(metric).unit}", loc="left")
            ax.set_ylim(bottom=0)
        step_axis(axes[2], run.steps)
        figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=6)
        return Image.open(io.BytesIO(png(figure)[0]))


def take_page(page: Path, out: Path, profile: Path) -> None:
    """Save the first screen of a page as it looks in Chromium, at twice the size."""
    look = [*HEADLESS.split(), f"--user-data-dir={profile}", "--window-size=1060,760"]
    command = ["chromium", *look, f"--screenshot={out}", page.absolute().as_uri()]
    subprocess.run(command, check=True, timeout=120)
    with Image.open(out) as image:
        save(image, out)


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
    save(draw_story(demo), images / "story.png")
    put_beside(draw_curves(demo), images / "curves.png")
    figures = demo / "sweep" / "report" / "figures"
    put_beside([Image.open(figures / f"{name}.png") for name in FIGURES], images / "report.png")
    with tempfile.TemporaryDirectory() as profile:
        take_page(demo / "sweep" / "report" / "index.html", images / "page.png", Path(profile))
        take_pictures(demo, images, Path(profile))
