"""A metric written in one file outside the package arrives wherever those of the package do."""

import numpy as np
import pandas as pd
import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from embedgeo import EmbeddingMoments, GeometryMonitor
from embedgeo.glossary import foreign_terms, learn, term
from embedgeo.report import write_report
from embedgeo.results.folder import SweepFolder
from tests.files import events_of
from tests.metrics.own_metric import PositiveShare
from tests.models import gpt_neox, token_batch
from tests.training.runs import fit, observed_on

KEYS = ("positive_share", "positive_share_spread")


class NumRows(EmbeddingMoments):
    """The number of rows, on which baselines depend, and no more to draw."""

    def compute(self):
        return {"n": super().compute()["n"]}


def metrics(dim):
    return [NumRows(dim), PositiveShare(dim)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a monitored run, and its monitor."""
    folder = tmp_path_factory.mktemp("run")
    monitor = GeometryMonitor(every_n_steps=2, metrics=metrics, on_error="raise")
    fit(folder, monitor, max_steps=3, logger=TensorBoardLogger(folder, name="", version=""))
    return folder, monitor


def test_its_name_is_in_tensorboard(run):
    folder, _ = run
    events = events_of(folder)
    assert {f"geometry.{key}/block.00" for key in KEYS} <= {*events.Tags()["scalars"]}
    layout = (
        events.Tensors("custom_scalars__config__")[0]
        .tensor_proto.string_val[0]
        .decode(errors="replace")
    )
    assert "positive entries (positive_share)" in layout


def test_the_report_has_its_name_its_meaning_and_its_baseline(run, unpainted):
    folder, _ = run
    page = write_report([folder], folder / "report").parent
    text = (page / "index.html").read_text()
    for key in KEYS:
        assert term(key).meaning in text
        assert term(key).unit in text
        assert f"{term(key).name} <code>{key}</code>" in text
        figures = {path.stem for path in (page / "figures").glob(f"{key}-*.png")}
        assert figures >= {f"{key}-{kind}" for kind in ("dynamics", "profile", "heatmap")}
    table = pd.read_csv(page / "metrics.csv")
    n = table[table["metric"] == "n"].set_index(["step", "layer"])["value"]
    found = (
        table[table["metric"].isin(KEYS) & (table["layer"] != "mean")]
        .set_index(["metric", "step", "layer"])["gaussian"]
        .unstack("metric")
    )
    np.testing.assert_allclose(found["positive_share"], 0.5)
    np.testing.assert_allclose(
        found["positive_share_spread"], np.sqrt(0.25 / n.reindex(found.index))
    )


def test_its_tables_of_kinds_of_their_own_are_saved_and_read(tmp_path):
    geometry = observed_on(gpt_neox(), [token_batch(4)], metrics=metrics)
    geometry.save(tmp_path, model="tiny", step=0)
    tables = SweepFolder(tmp_path).read_tables("tiny--step0")
    pd.testing.assert_frame_equal(tables["signs"], geometry.layer_tables()["signs"])
    assert list(geometry.token_tables()) == ["layer", "layer_index", "token_id", "n"]


def test_terms_travel_as_text_and_what_is_known_stays():
    written = foreign_terms(["V", "positive_share", "nobody_knows_it"])
    learn(
        written.replace("positive_share", "positive_share_elsewhere").replace(
            '"shape"', '"of another version"'
        )
    )
    assert term("positive_share_elsewhere") == term("positive_share")._replace(group="more")
    learn(written.replace("positive entries", "renamed").replace('"positive_share"', '"V"'))
    learn(written.replace("positive entries", "renamed"))
    assert (term("V").name, term("positive_share").name) == ("V", "positive entries")
    assert foreign_terms(["V", "V_without_massive", "nobody_knows_it"]) == ""
