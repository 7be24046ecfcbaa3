"""Groups of models as options give them."""

import pytest

from embedgeo.results.groups import groups_of, parse_groups

MODELS = ["google/bert", "openai/gpt2", "/runs/mine/gpt2/", "lab/t5"]


@pytest.mark.parametrize(
    "given",
    [
        "encoder=a/x,b decoder=c",
        ["encoder=a/x", "decoder=c encoder=b"],
        {"encoder": ("a/x", "b"), "decoder": "c"},
    ],
)
def test_every_way_of_giving_groups(given):
    assert parse_groups(given) == {"a/x": "encoder", "b": "encoder", "c": "decoder"}


def test_no_groups():
    assert parse_groups(()) == parse_groups({}) == parse_groups(None) == {}


@pytest.mark.parametrize("given", ["encoder", "=a", ["encoder=a,,b"], {"e": [1]}, 5])
def test_nonsense_is_refused_in_one_line(given):
    with pytest.raises(ValueError, match=r"as encoder=a,b decoder=c, .*; got ") as caught:
        parse_groups(given)
    assert "\n" not in str(caught.value)


def test_a_model_in_two_groups_is_refused():
    with pytest.raises(ValueError, match="in one model_group; a is in encoder and in decoder"):
        parse_groups("encoder=a decoder=a,b")
    with pytest.raises(ValueError, match="google/bert is in a and in b"):
        groups_of({"bert": "a", "google/*": "b"}, MODELS)


def test_names_of_models_short_names_and_patterns():
    assert groups_of({"bert": "e", "lab/*": "e", "openai/gpt2": "d"}, MODELS) == {
        "google/bert": "e",
        "lab/t5": "e",
        "openai/gpt2": "d",
    }
    assert groups_of({"lab/*": "e"}, ["lab/*", "lab/a"]) == {"lab/*": "e", "lab/a": "e"}
    assert groups_of({"gpt2": "d"}, MODELS) == {"openai/gpt2": "d", "/runs/mine/gpt2/": "d"}
    with pytest.raises(ValueError, match=r"bart is none of google/bert, openai/gpt2"):
        groups_of({"bart": "e"}, MODELS)
