"""TensorBoard shows a monitored run: what its server says, and what a browser draws."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from urllib.parse import urlencode

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from embedgeo import GeometryMonitor
from embedgeo.glossary import headlines
from embedgeo.results.events import tagged_scalars
from embedgeo.results.records import Record, block_means
from tests.training.runs import fit

pytestmark = pytest.mark.slow


MEASURED = [0, 2, 4]
BLOCKS = ["block.00", "block.01", "block.02"]
MLPS = [f"gpt_neox.layers.{i:02d}.mlp" for i in range(3)]
LAYERS = {
    "run": [*BLOCKS, "embed", "final_norm", *MLPS, "mean", "mean_last2"],
    "two sides (T5)": [
        *("decoder.block.00", "decoder.embed", "decoder.mean", "decoder.mean_last4"),
        *("encoder.block.00", "encoder.final_norm", "encoder.mean", "x_y_a_1"),
    ],
}
TWO_SIDES = [
    *(
        "encoder.block.00",
        "encoder.final_norm",
        "decoder.embed",
        "decoder.block.00",
        "decoder.mean(last4)",
    ),
    'x y, "a" (1)',
]
INSIDE = """
const inside = root => [...root.querySelectorAll("*")].flatMap(e => [e, ...(e.shadowRoot ? inside(e.shadowRoot) : [])]);
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """TensorBoard on a small monitored run, and on a second one of an encoder-decoder: its
    address.
    """
    folder = tmp_path_factory.mktemp("run")
    layers = ["blocks", "mean(last2)", "*.mlp"]
    monitor = GeometryMonitor(every_n_steps=2, layers=layers, measure_last=False, on_error="raise")
    fit(folder, monitor, max_steps=6, logger=TensorBoardLogger(folder, name="tb", version="run"))
    with SummaryWriter(str(folder / "tb" / "two sides (T5)")) as writer:
        for step in MEASURED:
            for metric in {record["metric"] for record in monitor.history}:
                values = [
                    Record(layer=x, layer_index=0, width=8, metric=metric, value=step)
                    for x in TWO_SIDES
                ]
                for tag, value in tagged_scalars([*values, *block_means(values)]).items():
                    writer.add_scalar(tag, value, step)
    options = ["--logdir", folder / "tb", "--host", "127.0.0.1", "--port", "0"]
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tensorboard.main", *options], stdout=file, stderr=file
        )
    try:
        end = time.monotonic() + 60
        while not (address := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield address[0]
    finally:
        process.terminate()
        process.wait(20)


def get(address, path, **query):
    url = f"{address}/data/plugin/{path}?{urlencode(query)}"
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def charts(server):
    """Title and regular expression of each chart, in order."""
    layout = get(server, "custom_scalars/layout")
    return [
        (c["title"], c["multiline"]["tag"][0])
        for category in layout["category"]
        for c in category["chart"]
    ]


def test_the_server_has_data_for_every_chart(server, charts):
    assert [title for title, _ in charts[:5]] == [
        "V_W / V (V_W_over_V_unbiased)",
        "M / Q (M_over_Q)",
        "anisotropy",
        "dimension between tokens (intrinsic_dimension_between)",
        "mean cosine",
    ]
    for title, pattern in charts:
        for run, layers in LAYERS.items():
            series = get(server, "custom_scalars/scalars", run=run, tag=pattern)["tag_to_events"]
            found = [tag.rsplit("/", 1)[1] for tag in sorted(series)]
            assert found == layers, title
            assert all([event[1] for event in events] == MEASURED for events in series.values()), (
                title
            )


def test_the_custom_scalars_page_draws_a_line_a_layer(server, charts, browser):
    browser.open(f"{server}/#custom_scalars")
    drawn = browser.wait(
        INSIDE
        + """
        const cards = inside(document).filter(e => e.tagName === "TF-CUSTOM-SCALAR-MULTI-LINE-CHART-CARD");
        const points = path => path.getAttribute("d").split("L").length;
        const shown = cards.slice(0, arguments[0]).map(card => [inside(card.shadowRoot).map(e => e.textContent).join(),
            inside(card.shadowRoot).filter(e => e.matches("path.line") && points(e) > 2).length]);
        return shown.length === arguments[0] && shown.every(([_, lines]) => lines === arguments[1]) && shown;
        """,
        len(headlines()),
        2 * sum(map(len, LAYERS.values())),  # smoothed, and pale as they are
    )
    for (title, _), (text, _) in zip(charts, drawn, strict=False):
        assert title in text
