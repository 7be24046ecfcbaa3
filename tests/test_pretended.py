"""The pretended GPU refuses what a GPU refuses, and counts what it would have to do."""

import threading

import pytest
import torch

from tests.models import gpt_neox, token_batch
from tests.pretended import COMPILER, GPU, pretended

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++, for a device guard")


@pytest.fixture
def count():
    with pretended() as counted:
        yield counted


MIXED = {
    "sum": lambda x: x + torch.ones(3),
    "product": lambda x: x @ torch.ones(3),
    "concatenation": lambda x: torch.cat((x, torch.ones(3))),
    "stack of numbers": lambda x: torch.stack((x.sum(), torch.ones(()))),
    "index": lambda x: x.index_select(0, torch.tensor([0])),
    "written to the CPU": lambda x: torch.ones(()).add_(x.sum()),
    "written at an index": lambda x: x.index_add_(0, torch.tensor([0], device=GPU), torch.ones(1)),
}


@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED.keys())
def test_devices_do_not_mix(count, mixed):
    x = torch.ones(3).to("cuda")
    with pytest.raises(RuntimeError, match="is on the CPU"):
        mixed(x)


def test_a_number_of_the_cpu_may_stand_beside_a_tensor(count):
    x = torch.arange(3.0, device="cuda")
    x[0] = 5
    got = torch.where(x > torch.tensor(1.5), x, torch.tensor(0.0)) + torch.tensor(1.0)
    assert got.device == x.device == GPU
    assert got.tolist() == [6, 1, 3]


WAITS = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "copy_": lambda x: torch.empty(3).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "boolean index": lambda x: x[x > 1],
    "written at a boolean index": lambda x: x.index_put_((x > 1,), x[:1]),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: x.unique_consecutive(),
    "bincount": lambda x: x.long().bincount(),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "equal": lambda x: x.equal(x),
    "eigvalsh": lambda x: torch.linalg.eigvalsh(x[:, None] * x),
    "inv": lambda x: torch.linalg.inv(x.diag()),
    "synchronize": lambda x: torch.cuda.Stream(GPU).synchronize(),
}
NO_WAITS = {
    "arithmetic": lambda x: (x * 2).sum(),
    "filled at a boolean index": lambda x: x.masked_fill_(x > 1, 0.0),
    "number at a boolean index": lambda x: x.__setitem__(x > 1, 0.0),
    "index": lambda x: x[x.argsort()],
    "repeat_interleave of known size": lambda x: x.repeat_interleave(x.long(), output_size=6),
    "cholesky_ex": lambda x: torch.linalg.cholesky_ex(x.diag()),
}


@pytest.mark.parametrize("work", [*WAITS.values(), *NO_WAITS.values()], ids=[*WAITS, *NO_WAITS])
def test_waits_are_counted(count, work, request):
    x = torch.tensor([1.0, 2.0, 3.0], device="cuda")
    count.clear()
    work(x)
    assert count.asked().waits == (request.node.callspec.id in WAITS)


def test_launches_are_counted_and_views_are_none(count):
    x = torch.zeros(4, 6, device="cuda")
    count.clear()
    assert x.view(3, 8).T[1:].unsqueeze(0).detach().shape == (1, 7, 3)
    assert x.to("cuda", torch.float32) is x
    torch.empty_like(x)
    assert count.asked() == (0, 0, 0, 0)
    (x + 1).mul_(2)
    assert count.asked() == (2, 0, 0, 0)


def test_copies_are_counted_with_their_bytes(count):
    x = torch.ones(5, 2).to("cuda")
    assert count.asked() == (1, 0, 1, 0)
    x.double().cpu()
    assert count.asked() == (3, 1, 1, 80)


def test_copies_that_do_not_block_are_no_waits(count):
    x = torch.ones(5, 2).to("cuda", non_blocking=True)
    torch.empty(5, 2).copy_(x, non_blocking=True)
    assert torch.empty(0).to("cuda").cpu().shape == (0,)
    assert count.asked() == (2, 0, 0, 40)


def test_in_place_operations_change_the_tensor(count):
    x = torch.zeros(2, 1, 3, device="cuda")
    x[0].add_(1)
    assert x.squeeze_(1) is x
    assert x.tolist() == [[1, 1, 1], [0, 0, 0]]


def test_threads_count_together(count):
    x = torch.ones(3, device="cuda")
    count.clear()
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.arange(3.0, device="cuda") + x))
    thread.start()
    thread.join()
    assert made[0].tolist() == [1, 2, 3]
    assert count.asked().launches == 3


def test_a_product_may_have_a_wider_dtype(count):
    x = torch.tensor([[1.0, 2.0**-10]], dtype=torch.bfloat16)
    assert torch.mm(x.to("cuda"), x.T.to("cuda"), out_dtype=torch.float32).item() == 1 + 2.0**-20


def test_nothing_works_outside_of_the_context():
    with pretended():
        x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="outside of its context"):
        x + 1


def test_a_model_trains_as_on_the_cpu():
    def trained(device):
        torch.manual_seed(0)
        model, batch = (
            gpt_neox(attn_implementation="eager").to(device),
            {key: each.to(device) for key, each in token_batch().items()},
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            model(**batch, labels=batch["input_ids"]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert {parameter.device.type for parameter in model.parameters()} == {
            torch.device(device).type
        }
        return [parameter.detach().cpu() for parameter in model.parameters()]

    with pretended():
        got = trained("cuda")
    assert all(a.equal(b) for a, b in zip(got, trained("cpu"), strict=True))
