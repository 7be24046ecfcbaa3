from tests.conftest import left_out


def test_targets_that_run_the_rest_are_named():
    ignored = ["/here/tests/integrations"]
    for marked, rest in (("not slow", "make test-slow"), ("slow", "make test")):
        said = [line.rpartition(": ")[2] for line in left_out(marked, ignored, [])]
        assert said == [rest, "make integrations"]
    assert left_out("", [], []) == []


def test_a_reason_is_a_line_whatever_it_holds_for():
    reasons = [
        "Skipped: needs a GPU with CUDA",
        "Skipped: needs a browser",
        "Skipped: needs a GPU with CUDA",
    ]
    assert left_out("", [], reasons) == [
        "2 tests: needs a GPU with CUDA",
        "1 test: needs a browser",
    ]
