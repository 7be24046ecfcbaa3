import io
from itertools import pairwise

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from embedgeo import EmbeddingMoments, GeometryMonitor
from embedgeo.glossary import headlines, known_terms
from embedgeo.report import figures, live
from embedgeo.report.figures import profile
from embedgeo.training.loggers import Adapter, Media
from tests.records import layer_records
from tests.training.runs import TinyLM, fit

LAYERS = ["embed", "block.00", "block.01", "final_norm"]


def events(folder):
    return EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0}).Reload()


def image_steps(folder):
    found = events(folder)
    return {tag: [event.step for event in found.Images(tag)] for tag in found.Tags()["images"]}


def records(step, value=1.0, layers=LAYERS, metrics=("mean_cosine", "M", "V")):
    return layer_records(step, value, layers=layers, metrics=metrics)


class Clock:
    """Replaces the clock: drawing takes a second."""

    def __init__(self, monkeypatch, pictures):
        self.now = 0.0
        self.pictures = pictures
        monkeypatch.setattr(live, "draw_pictures", self.draw)
        monkeypatch.setattr(live, "monotonic", lambda: self.now)

    def draw(self, *args):
        yield from self.pictures(*args)
        self.now += 1


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch, live.draw_pictures)


@pytest.fixture
def quick_clock(monkeypatch):
    """The same with empty pictures, which really take no time."""
    return Clock(monkeypatch, lambda history, prefix, kinds: [(f"geometry.{kind}/x", (b"", 1, 1)) for kind in kinds])


class Writer(Adapter):
    """Takes what is written instead of a logger."""

    def __init__(self):
        self.images, self.texts = [], []

    def write_image(self, tag, picture, step):
        self.images.append((tag, step, picture))

    def write_text(self, tag, markdown, step):
        self.texts.append((tag, markdown, step))

    def at(self, kind):
        return [step for tag, step, _ in self.images if tag.startswith(f"geometry.{kind}/")]


@pytest.mark.slow
def test_tensorboard_gets_images_and_a_text(tmp_path, clock):
    monitor = GeometryMonitor(every_n_steps=1, on_error="raise")
    fit(tmp_path, monitor, max_steps=6, logger=TensorBoardLogger(tmp_path, name="tb", version=""))
    steps = image_steps(tmp_path / "tb")
    assert steps.keys() == {
        *(f"geometry.{kind}/{metric}" for metric in headlines() for kind in ("curves", "heatmap", "profile")),
        "geometry.shares/M, V_W, V_B",
    }
    for tag, at in steps.items():
        assert at == [0, 1, 3, 6], tag
    found = events(tmp_path / "tb")
    for tag in steps:
        image = Image.open(io.BytesIO(found.Images(tag)[-1].encoded_image_string))
        assert image.size == (found.Images(tag)[-1].width, found.Images(tag)[-1].height)
        assert image.width == 700, tag  # twice what TensorBoard shows: it leaves out pixels, and blends none
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 10
    (text,) = found.Tensors("geometry/what the numbers mean/text_summary")
    written = text.tensor_proto.string_val[0].decode()
    for metric in {record["metric"] for record in monitor.history}:
        assert f"| {metric} |" in written
        assert known_terms()[metric].meaning in written


@pytest.mark.slow
def test_the_images_of_a_run_are_of_that_run_only(tmp_path):
    monitor = GeometryMonitor(every_n_steps=1, metrics=lambda dim: [EmbeddingMoments(dim)], on_error="raise")
    for name, max_steps in (("first", 5), ("second", 2)):
        fit(tmp_path, monitor, max_steps=max_steps, logger=TensorBoardLogger(tmp_path, name=name, version=""))
    steps = image_steps(tmp_path / "second")
    assert steps["geometry.heatmap/mean_cosine"] == [0, 1, 2]


def test_other_loggers_get_no_images(tmp_path):
    monitor = GeometryMonitor(every_n_steps=2, metrics=lambda dim: [EmbeddingMoments(dim)], on_error="raise")
    fit(tmp_path, monitor, max_steps=3, logger=CSVLogger(tmp_path))
    assert len({record["step"] for record in monitor.history}) == 3


@pytest.mark.parametrize("late", [False, True])
def test_a_failure_in_drawing_turns_monitoring_off_and_training_goes_on(tmp_path, monkeypatch, late):
    def broken(self, loggers, history, *, last=False):
        if last == late:
            raise ValueError("no room to draw")

    monkeypatch.setattr(Media, "write", broken)
    plain, _ = fit(tmp_path, max_steps=4)
    monitor = GeometryMonitor(every_n_steps=2, metrics=lambda dim: [EmbeddingMoments(dim)])
    with pytest.warns(UserWarning, match="GeometryMonitor is off .* ValueError: no room to draw"):
        module, run = fit(tmp_path, monitor, max_steps=4, logger=TensorBoardLogger(tmp_path))
    assert run.global_step == 4
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), module.parameters(), strict=True))


def test_only_rank_zero_draws(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(Media, "write", lambda self, loggers, *args, **kwargs: given.extend(loggers))
    monkeypatch.setattr(L.Trainer, "is_global_zero", property(lambda self: False))
    monitor = GeometryMonitor(every_n_steps=2, metrics=lambda dim: [EmbeddingMoments(dim)], on_error="raise")
    fit(tmp_path, monitor, module=TinyLM(), max_steps=4, logger=TensorBoardLogger(tmp_path))
    assert not given


@pytest.mark.parametrize(("count", "drawn"), [(1, [0]), (3, [0, 1, 2]), (4, [0, 1, 3]), (20, [0, 1, 3, 7, 15, 19])])
def test_pictures_are_drawn_at_powers_of_two_and_at_the_end(quick_clock, count, drawn):
    pictures, writer, history = Media("geometry"), Writer(), []
    for step in range(count):
        history += records(step, value=step + 1.0)
        pictures.write([writer], history)
    pictures.write([writer], history, last=True)
    assert writer.at("curves") == writer.at("heatmap") == writer.at("profile") == writer.at("shares") == drawn
    assert len(writer.texts) == 1


@pytest.mark.parametrize(("pause", "drawn"), [(60, range(20)), (30, [0, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19])])
def test_curves_and_heatmaps_of_other_measurements_are_drawn_where_drawing_takes_little_of_the_time(
    quick_clock, pause, drawn
):
    pictures, writer, history = Media("geometry"), Writer(), []
    for step in range(20):
        history += records(step)
        pictures.write([writer], history)
        quick_clock.now += pause
    assert writer.at("curves") == writer.at("heatmap") == list(drawn)
    assert writer.at("profile") == writer.at("shares") == [0, 1, 3, 7, 15]
    pictures.write([writer], history, last=True)
    assert (
        writer.at("curves") == writer.at("heatmap") == list(drawn)
    )  # of the last measurement only what has not been drawn yet
    assert writer.at("profile") == writer.at("shares") == [0, 1, 3, 7, 15, 19]
    pictures.write([writer], [], last=True)  # a history that was cleared


def test_what_a_long_run_draws_grows_with_the_logarithm_of_its_length(quick_clock):
    pictures, writer, history = Media("geometry"), Writer(), []
    for step in range(1000):
        history += records(step, layers=LAYERS[:1], metrics=["M"])
        pictures.write([writer], history)
        quick_clock.now += 60
    drawn = np.array(writer.at("curves")) + 1
    assert drawn[:20].tolist() == list(range(1, 21))
    assert 90 <= len(drawn) <= 120
    assert max(drawn[1:] - drawn[:-1] * 1.05) < 1


def test_the_history_before_a_resume_is_drawn_too(monkeypatch, clock):
    steps = []
    monkeypatch.setattr(figures, "profile", lambda run, metric: steps.append(run.steps) or profile(run, metric))
    pictures, writer = Media("geometry"), Writer()
    history = [*records(0), *records(10), *records(20)]
    pictures.write([writer], history)
    pictures.write([writer], [*history, *records(25)])
    assert steps == [[0, 10, 20], [0, 10, 20, 25]]
    assert writer.at("heatmap") == [20, 25]


def test_without_measurements_nothing_is_drawn():
    pictures, writer = Media("geometry"), Writer()
    pictures.write([writer], [])
    pictures.write([writer], [], last=True)
    assert not writer.images
    assert not writer.texts


@pytest.mark.usefixtures("unpainted")
def test_the_steps_drawn_are_bounded_and_span_all_steps(monkeypatch):
    runs = []
    monkeypatch.setattr(figures, "profile", lambda run, metric: runs.append(run) or profile(run, metric))

    def steps_drawn(steps):
        history = [record for step in steps for record in records(step, layers=LAYERS[:2], metrics=("mean_cosine",))]
        assert len([*live.draw_pictures(history, "geometry", ["profile"])]) == 1
        return runs[-1].steps

    steps = [*range(0, 100), *range(100, 300_000, 250)]
    drawn = steps_drawn(steps)
    assert 256 <= len(drawn) <= 512
    assert set(drawn) <= set(steps)
    assert drawn[:5] == [0, 1, 2, 3, 4]
    assert drawn[-1] == steps[-1]
    assert max(b / a for a, b in pairwise(drawn) if a >= 2000) < 1.2
    assert steps_drawn(steps[:512]) == steps[:512]
    assert steps_drawn([7]) == [7]
    gaps = np.diff(steps_drawn(range(0, 100_000, 100)))
    assert set(gaps) == {100, 200}  # steps that are evenly spaced stay so


@pytest.mark.parametrize("value", [0.0, -3.0])
def test_equal_values_at_a_single_step_can_be_drawn(value):
    writer = Writer()
    Media("geometry").write([writer], records(5, value, layers=["x" * 40]))
    assert writer.at("curves") == writer.at("heatmap") == writer.at("profile") == [5]


def test_the_figures_are_the_reports_of_what_was_measured(monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "profile", lambda run, metric: drawn.append(run) or profile(run, metric))
    pictures, writer = Media("geometry"), Writer()
    history = [*records(0, 2.0), *records(10, 3.0), *records(10, np.inf, LAYERS[:1])]
    pictures.write([writer], [*history, *records(20, 4.0, [*LAYERS, "late"])[-3:]], last=True)
    run = drawn[0]
    assert run.steps == [0, 10, 20]
    assert run.layers == [*LAYERS, "late"]
    nan = np.nan
    np.testing.assert_array_equal(run.table("M"), [[2, 2, 2, 2, nan], [nan, 3, 3, 3, nan], [nan, nan, nan, nan, 4]])
    assert set(run.metrics) == {"mean_cosine", "M", "V"}


def test_means_over_layers_have_no_depth_to_be_drawn_over():
    writer = Writer()
    Media("geometry").write([writer], records(0, layers=["mean(last4)"]), last=True)
    assert not writer.images
    assert len(writer.texts) == 1


def test_metrics_of_the_users_own_are_explained_once_and_not_drawn(clock):
    pictures, writer, history = Media("geometry"), Writer(), []
    for step in range(3):
        history += records(step, metrics=["mine"])
        pictures.write([writer], history)
    assert not writer.images
    assert len(writer.texts) == 1
    pictures.write([writer], [*history, *records(3)], last=True)
    assert writer.at("heatmap") == [3]
