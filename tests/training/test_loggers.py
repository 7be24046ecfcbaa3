"""What loggers get beside scalars; those of other packages are in tests/integrations."""

import logging
import sys

import numpy as np
import pandas as pd
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.tensorboard import SummaryWriter

from embedgeo import GeometryMonitor, StepMonitor
from embedgeo.report import live
from embedgeo.results.events import custom_layout, event_contents
from embedgeo.training.loggers import COLUMNS, Adapter, Charts, Csv, Media, adapter_of
from tests.models import gpt_neox, token_batch
from tests.records import layer_records
from tests.training.runs import fit, moments

OPTIONS = {"every_n_steps": 2, "metrics": moments, "on_error": "raise"}


@pytest.fixture
def drawings(monkeypatch):
    """The numbers of records of which pictures are drawn: empty ones, four each time."""
    drawn = []

    def draw(history, prefix):
        drawn.append(len(history))
        return [(f"{prefix}.{kind}/V", (b"PNG", 1, 1)) for kind in range(4)]

    monkeypatch.setattr(live, "draw_pictures", draw)
    return drawn


class Taker(Adapter):
    """A logger that takes pictures and text, and may fail."""

    def __init__(self, error=None):
        self.images, self.texts, self.error = [], [], error

    def write_image(self, tag, picture, step):
        if self.error:
            raise self.error
        self.images.append((tag, picture, step))

    def write_text(self, tag, markdown, step):
        self.texts.append((tag, step))


class TakingLogger(Taker, DummyLogger):
    """Lightning's logger that is its own adapter."""

    def __init__(self, error=None):
        DummyLogger.__init__(self)
        Taker.__init__(self, error)


def assert_is_history(path, history):
    expected = pd.DataFrame(history, columns=list(COLUMNS))
    pd.testing.assert_frame_equal(pd.read_csv(path), expected, check_dtype=False, rtol=1e-14)


def test_nothing_is_drawn_where_no_logger_takes_pictures(tmp_path, drawings):
    monitor = GeometryMonitor(**OPTIONS)
    fit(tmp_path, monitor, max_steps=3, logger=CSVLogger(tmp_path))
    model = gpt_neox()
    with StepMonitor(model, log=lambda step, scalars: None, **OPTIONS) as stepped, stepped.step(0):
        model(**token_batch(2))
    assert monitor.history
    assert stepped.history
    assert not drawings


def test_a_logger_that_fails_leaves_the_others_and_the_monitor_at_work(tmp_path, drawings):
    broken, taker = TakingLogger(ValueError("no room")), TakingLogger()
    monitor = GeometryMonitor(every_n_steps=1, metrics=moments)
    with pytest.warns(
        UserWarning,
        match=r"takinglogger gets no more charts, text and pictures of .*ValueError: no room",
    ) as found:
        fit(tmp_path, monitor, max_steps=3, logger=[CSVLogger(tmp_path), broken, taker])
    assert len([each for each in found if "no room" in str(each.message)]) == 1
    assert {0, 3} <= {step for _, _, step in taker.images}
    assert_is_history(tmp_path / "lightning_logs/version_0/geometry.csv", monitor.history)
    assert sorted({record["step"] for record in monitor.history}) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="no room"):
        Media("geometry", on_error="raise").write([Taker(ValueError("no room"))], layer_records(0))


def test_lightnings_loggers_write_on_rank_zero_alone(tmp_path, monkeypatch, drawings):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    model = gpt_neox()
    for log in (CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")):
        with StepMonitor(model, log=log, **OPTIONS) as monitor, monitor.step(0):
            model(**token_batch(2))
        assert monitor.history
    assert not drawings
    assert not [
        path for path in tmp_path.rglob("*") if path.is_file() and path.name != "history.parquet"
    ]


def test_without_what_draws_them_there_are_no_pictures_and_one_line_says_so(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    taker, media, history = Taker(), Media("geometry"), []
    for step in range(3):
        history += layer_records(step)
        media.write([taker], history)
    (line,) = caplog.messages
    assert "matplotlib, which is not installed" in line
    assert "pip install 'embedgeo[report]'" in line
    assert taker.texts
    assert not taker.images


def test_csv_logger_has_a_tidy_file_beside_its_wide_one(tmp_path):
    monitors = [
        GeometryMonitor(**OPTIONS, jackknife=2),
        GeometryMonitor(**OPTIONS, prefix="probe/one"),
    ]
    fit(tmp_path, *monitors, max_steps=5, logger=CSVLogger(tmp_path, name="", version="run"))
    assert_is_history(tmp_path / "run" / "geometry.csv", monitors[0].history)
    assert_is_history(tmp_path / "run" / "geometry.probe%2Fone.csv", monitors[1].history)
    assert pd.read_csv(tmp_path / "run" / "geometry.csv")["stderr"].notna().any()
    assert "geometry.V/mean" in pd.read_csv(tmp_path / "run" / "metrics.csv")


def test_the_tidy_file_is_whole_after_each_measurement_and_only_appended_to(tmp_path):
    written, history, path = Csv(tmp_path), [], tmp_path / "geometry.csv"
    before = b""
    for step in range(3):
        history += layer_records(step, value=step / 3 if step else np.nan)
        for _ in range(2):
            written.write_charts(Charts("geometry", ["V"]), history)
            assert path.read_bytes().startswith(before)
            assert_is_history(path, history)
        before = path.read_bytes()


@pytest.mark.parametrize("end", [b"", b"7,embed,0", b"4,embed,0,8,V,1.0,\n"])
def test_a_resumed_run_goes_on_with_the_tidy_file(tmp_path, end):
    first = [*layer_records(0), *layer_records(2), *layer_records(4)]
    Csv(tmp_path).write_charts(Charts("geometry", ["V"]), first)
    with (tmp_path / "geometry.csv").open("ab") as file:
        file.write(end)  # what a kill left, or a step that will be repeated
    second = layer_records(4, value=2.0)
    Csv(tmp_path).write_charts(Charts("geometry", ["V"]), second)
    assert_is_history(tmp_path / "geometry.csv", [*first[:4], *second])
    # one that has started at step 0 leaves out what another one has measured later
    Csv(tmp_path).write_charts(Charts("geometry", ["V"], start=0), layer_records(5))
    kept = [*first[: len(layer_records(0))], *layer_records(5)]
    assert_is_history(tmp_path / "geometry.csv", kept)
    Csv(tmp_path).write_charts(Charts("geometry", ["V"]), layer_records(0))
    assert_is_history(tmp_path / "geometry.csv", layer_records(0))


def test_two_monitors_of_one_prefix_have_a_tidy_file_each(tmp_path):
    one, two = Csv(tmp_path), Csv(tmp_path)
    charts, first, second = Charts("geometry", ["V"]), layer_records(0), layer_records(1)
    one.write_charts(charts, first)
    two.write_charts(charts, second)
    with pytest.warns(UserWarning, match=r"geometry\.csv must have one monitor"):
        one.write_charts(charts, [*first, *second])
    two.write_charts(charts, [*second, *layer_records(2)])
    assert_is_history(tmp_path / "geometry.1.csv", [*first, *second])
    assert_is_history(tmp_path / "geometry.csv", [*first, *second, *layer_records(2)])


def test_another_programs_file_is_not_touched(tmp_path):
    (tmp_path / "geometry.csv").write_text("x,y\n1,2\n")
    with pytest.raises(ValueError, match=r"geometry\.csv must begin with the columns step,layer"):
        Csv(tmp_path).write_charts(Charts("geometry", ["V"]), layer_records(0))
    assert (tmp_path / "geometry.csv").read_text() == "x,y\n1,2\n"


def test_what_another_run_has_measured_before_is_not_given(tmp_path):
    history = [record for step in range(3) for record in layer_records(step)]
    Media("geometry", pictures=False, start=2).write([Csv(tmp_path)], history)
    assert_is_history(tmp_path / "geometry.csv", layer_records(2))


def test_the_users_custom_scalars_are_kept(tmp_path):
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_custom_scalars({"mine": {"loss": ["Multiline", ["loss"]]}})
        for prefix in ("one", "two"):
            adapter_of(writer).write_charts(Charts(prefix, ["V"]), layer_records(0))
    titles = [each.title for each in custom_layout(event_contents(tmp_path)).category]
    assert titles == ["two: size and variance", "one: size and variance", "mine"]
