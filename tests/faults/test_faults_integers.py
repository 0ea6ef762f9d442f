"""Row 11 where an integer means something: padding of one's own, labels that are ignored."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_runs import losses, run
from torch import nn

from clipwise import errors

IDS = torch.randint(4, 9, (48, 12), generator=torch.Generator().manual_seed(0))
Y = torch.arange(48) % 3


class Pooled(nn.Module):
    """A mean over what is left once padding was cut off for all at once."""

    def __init__(self, cut):
        super().__init__()
        self.cut, self.table, self.head = cut, nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.table(self.cut(ids)).tanh().mean(1))


def behind(ids):
    return ids[:, : max(int((ids != 2).sum(1).max()), 1)]


def before(ids):
    return ids[:, int((ids != 2).int().argmax(1).min()) :]


@pytest.mark.parametrize("cut", [behind, before])
def test_11_padding_of_ones_own_that_is_cut_off_for_all_at_once_is_refused(cut):
    training = run(model=Pooled(cut))
    with pytest.raises(errors.CrossExampleOp, match="hold the integer 2"):
        training.batches((IDS, Y))
    assert training.ledger.charges == 0


def test_11_a_collate_function_that_cuts_padding_off_is_refused():
    def trimmed(records):
        ids, labels = torch.stack([r[0] for r in records]), torch.stack([r[1] for r in records])
        return ids[:, : max(int((ids != 3).sum(1).max()), 1)], labels

    with pytest.raises(errors.CrossExampleOp, match="hold the integer 3"):
        run(model=Pooled(lambda ids: ids)).batches(list(zip(IDS, Y, strict=True)), collate_fn=trimmed)


def test_11_a_padding_id_that_only_a_name_tells_is_tried():
    class Named(Pooled):
        pad_token_id = 2

        def forward(self, ids):
            longest = max(sum(n != self.pad_token_id for n in row) for row in ids.tolist())
            return self.head(self.table(ids[:, : max(longest, 1)]).tanh().mean(1))

    model = Named(None)
    model.pad_token_id = 2
    with pytest.raises(errors.CrossExampleOp, match="hold the integer 2"):
        run(model=model).batches((IDS, Y))


def test_11_losses_over_the_labels_that_count_in_the_batch_are_refused():
    def shared(model, batch):
        found = losses(model, batch)
        return found * len(found) / (found != 0).sum()

    with pytest.raises(errors.CrossExampleOp, match="hold the integer -100"):
        run(model=nn.Sequential(nn.Linear(6, 3), nn.Tanh()), loss_fn=shared).batches((torch.randn(48, 6), Y))


def test_11_masked_padding_passes():
    class Masked(Pooled):
        def forward(self, ids):
            seen = (ids != 2)[..., None]
            return self.head((self.table(ids) * seen).sum(1) / seen.sum(1).clamp(min=1))

    training = run(model=Masked(None), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"))
    for batch in training.batches((IDS, Y)):
        training.step(batch)
    assert training.statement()["certified"]
