"""Integers with a meaning: the preflight finds them by itself, and tries records that hold them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from test_transformers import Collator as PadsTo
from test_transformers import arguments, model_of, plan
from torch import nn

import clipwise as cw
from clipwise.engine import constants, integers
from clipwise.engine.probes import with_integer
from clipwise.errors import CrossExampleOp
from clipwise.integrations.transformers import PrivateTrainer

PAD, WORDS = 2, 12
IDS = torch.randint(0, WORDS, (16, 9), generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(16) % 2


def begun(model, data, loss_fn, collate_fn=None, **options):
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.25, steps=2, expected_batch_size=8)
    run = cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn, **options)
    return run, run.batches(data, collate_fn=collate_fn)


def per_record(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Words(nn.Module):
    """Token numbers, trimmed to the longest text of the batch, and the mean of what is left."""

    def __init__(self, trim, masked=False, words=WORDS, pad=PAD, padding_idx=None):
        super().__init__()
        self.table, self.head = nn.Embedding(words, 4, padding_idx=padding_idx), nn.Linear(4, 2)
        self.trim, self.masked, self.pad = trim, masked, pad
        self.register_buffer("constant", torch.tensor(pad))
        self.register_buffer("several", torch.tensor([pad, words - 1]))

    def forward(self, ids):
        seen = self.trim(self, ids)
        longest = int(seen.sum(1).max())
        h, seen = self.table(ids)[:, :longest].tanh(), seen[:, :longest, None]
        return self.head((h * seen).sum(1) / seen.sum(1).clamp(min=1) if self.masked else h.mean(1))


TRIMS = {
    "an operator": lambda m, ids: ids != 2,
    "the other way round": lambda m, ids: ~(torch.tensor(2) == ids),
    "a method": lambda m, ids: ids.ne(2),
    "an attribute": lambda m, ids: ids.ne(m.pad),
    "a buffer": lambda m, ids: ids != m.constant,
    "is in": lambda m, ids: ~torch.isin(ids, torch.tensor([2, 7])),
    "python": lambda m, ids: torch.tensor([[n != m.pad_token_id for n in row] for row in ids.tolist()]),
}


def words(kind, **options):
    model = Words(TRIMS[kind], **options)
    model.pad_token_id = PAD
    return model


@pytest.mark.parametrize("kind", TRIMS)
def test_trimming_to_the_longest_is_refused_where_padding_is_an_integer_of_ones_own(kind):
    with pytest.raises(CrossExampleOp, match="hold the integer 2"):
        begun(words(kind), (IDS, LABELS), per_record)


@pytest.mark.parametrize("kind", TRIMS)
def test_a_mask_does_not_help_where_words_are_cut_off_behind_padding(kind):
    """Right for words and then padding, which only the user can know: the message says how to say so."""
    with pytest.raises(CrossExampleOp, match="every record holds it on one side alone"):
        begun(words(kind, masked=True), (IDS, LABELS), per_record)


class Masked(Words):
    """Cuts behind the last word and counts what is no padding: right wherever padding stands."""

    def forward(self, ids):
        seen = ids != self.pad
        stop = int((seen * torch.arange(1, ids.shape[1] + 1)).max())
        h, seen = self.table(ids)[:, :stop].tanh(), seen[:, :stop, None]
        return self.head((h * seen).sum(1) / seen.sum(1).clamp(min=1))


def test_a_cut_that_never_takes_a_word_passes_without_one():
    run, batches = begun(Masked(None), (IDS, LABELS), per_record)
    run.step(next(batches))


class FromTheLeft(Words):
    """The same for padding at the beginning."""

    def forward(self, ids):
        seen = ids != self.pad
        start = ids.shape[1] - int(seen.sum(1).max())
        h, seen = self.table(ids)[:, start:].tanh(), seen[:, start:, None]
        return self.head((h * seen).sum(1) / seen.sum(1).clamp(min=1) if self.masked else h.mean(1))


def test_padding_at_the_beginning():
    for masked in (False, True):
        with pytest.raises(CrossExampleOp, match="integer 2"):
            begun(FromTheLeft(None, masked=masked), (IDS, LABELS), per_record)


def test_where_public_records_have_an_integer_it_is_put_nowhere_else():
    ids = torch.where(torch.arange(9) < torch.tensor([[9], [5], [7]]), torch.randint(3, WORDS, (3, 9)), PAD)
    probe = [(row, i % 2) for i, row in enumerate(ids)]
    run, batches = begun(words("a method", masked=True), (IDS, LABELS), per_record, probe=probe)
    run.step(next(batches))
    with pytest.raises(CrossExampleOp):
        begun(words("a method"), (IDS, LABELS), per_record, probe=probe)


def test_labels_that_public_records_hold_vouch_for_no_token():
    """Labels of 0 and 1 beside texts without any padding of 0."""
    probe = [(torch.randint(3, WORDS, (9,)), i % 2) for i in range(3)]
    with pytest.raises(CrossExampleOp, match="integer 0"):
        begun(Words(lambda m, ids: ids != 0, pad=0), (IDS, LABELS), per_record, probe=probe)


def test_the_last_row_of_a_large_table():
    with pytest.raises(CrossExampleOp, match="integer 50256"):
        begun(Words(lambda m, ids: ids != 50256, False, 50257), (IDS, LABELS), per_record)


def test_padding_idx_of_an_embedding_says_which():
    def trim(m, ids):
        return m.table(ids).abs().sum(2) > 0

    with pytest.raises(CrossExampleOp, match="integer 2"):
        begun(Words(trim, padding_idx=2), (IDS, LABELS), per_record)
    begun(Masked(trim, padding_idx=2), (IDS, LABELS), per_record)


def test_lengths_cut_to_multiples_are_seen_with_a_padding_of_zero():
    def trim(m, ids):
        places = torch.arange(1, ids.shape[1] + 1)
        longest = -(-int(((ids != 0) * places).max()) // 16) * 16
        return (places <= longest).expand(ids.shape)

    with pytest.raises(CrossExampleOp, match="integer 0"):
        begun(Words(trim), (IDS.repeat(1, 8), LABELS), per_record)


@pytest.mark.parametrize("kind", ["lists", "arrays", "tensors"])
def test_records_of_every_kind(kind):
    class Texts:
        def __len__(self):
            return 16

        def __getitem__(self, i):
            x = IDS[i]
            return {"lists": x.tolist(), "arrays": x.numpy(), "tensors": x.to(torch.int32)}[kind], int(LABELS[i])

    def collate(records):
        return torch.stack([torch.as_tensor(r[0]) for r in records]).long(), torch.tensor([r[1] for r in records])

    with pytest.raises(CrossExampleOp, match="integer 2"):
        begun(words("an operator"), Texts(), per_record, collate)
    begun(Masked(None), Texts(), per_record, collate)


# -- labels ---------------------------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 3)

    def forward(self, ids):
        return self.head(self.table(ids))


def tagged(share):
    def losses(model, batch):
        ids, labels = batch
        found = F.cross_entropy(model(ids).transpose(1, 2), labels, reduction="none")
        return share(found, labels)

    return losses


def kept(labels):
    """How many labels of each record count."""
    return (labels != -100).sum(1)


MIXING = {
    "a mean over the batch": lambda x, y: x.sum(1) / kept(y).float().mean(),
    "ignored ones of the batch": lambda x, y: x.sum(1) / (1 + (y == -100).sum()),
}
SINGLE = {
    "a mean": lambda x, y: x.sum(1) / kept(y),
    "a mean of at least one": lambda x, y: x.sum(1) / kept(y).clamp(min=1),
    "all places": lambda x, y: x.mean(1),
}


@pytest.mark.parametrize("kind", MIXING)
def test_labels_that_are_ignored_by_all_together_are_refused(kind):
    with pytest.raises(CrossExampleOp, match="hold the integer -1"):
        begun(Tagger(), (IDS, IDS % 3), tagged(MIXING[kind]))


@pytest.mark.parametrize("kind", SINGLE)
def test_labels_that_are_ignored_by_each_alone_pass(kind):
    run, batches = begun(Tagger(), (IDS, IDS % 3), tagged(SINGLE[kind]))
    run.step(next(batches))


def test_a_record_without_any_label_may_have_no_number_if_it_has_none_in_a_batch_either():
    def own(model, batch):
        return per_record(model, batch) / (batch[1] != -100)

    def shared(model, batch):
        return per_record(model, batch) / (batch[1] != -100).sum() * len(batch[1])

    data = (torch.randn(16, 6), LABELS)
    begun(nn.Linear(6, 3), data, own)
    with pytest.raises(CrossExampleOp, match="integer -100"):
        begun(nn.Linear(6, 3), data, shared)


# -- collate functions ------------------------------------------------------------------------------------


class Pool(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.table(ids).tanh().mean(1))


TEXTS = [(ids, int(label)) for ids, label in zip(IDS, LABELS, strict=True)]


def stacked(records):
    return torch.stack([torch.as_tensor(r[0]) for r in records]), torch.tensor([r[1] for r in records])


def by_torch(records):
    ids, labels = stacked(records)
    return ids[:, : max(int((ids != 3).sum(1).max()), 1)], labels


class Tokenizer:
    """As those of Transformers: the number is made of something else."""

    words = ("a", "b", "c", "padding")

    @property
    def pad_token_id(self):
        return self.words.index("padding")


class Collator:
    """Compares in numpy, which no mode of torch sees."""

    def __init__(self, **kept):
        self.__dict__.update(kept)

    def __call__(self, records):
        ids, labels = stacked(records)
        pad = self.pad_id if hasattr(self, "pad_id") else self.tokenizer.pad_token_id
        return ids[:, : max(int((ids.numpy() != pad).sum(1).max()), 1)], labels


COLLATES = {
    "torch": by_torch,
    "a partial": functools.partial(by_torch),
    "an attribute": Collator(pad_id=3),
    "a tokenizer": Collator(tokenizer=Tokenizer()),
}


@pytest.mark.parametrize("kind", COLLATES)
def test_a_collate_function_that_trims_is_refused(kind):
    with pytest.raises(CrossExampleOp, match="integer 3"):
        begun(Pool(), TEXTS, per_record, COLLATES[kind])


class Odd:
    """Attributes of all kinds, and one that raises."""

    def __init__(self):
        self.args, self.keywords, self.tokenizer, self.config = object(), ["a"], None, 7
        self.pad_token_id, self.eos_id = "none", 10**30

    def __getattr__(self, name):
        raise KeyError(name)

    def __call__(self, records):
        return stacked(records)


def test_no_attribute_of_a_collate_function_is_in_the_way():
    run, batches = begun(Pool(), TEXTS, per_record, Odd())
    run.step(next(batches))


def test_a_collate_function_is_looked_at_with_vmap_too():
    begun(Pool(), TEXTS, per_record, stacked, engine="vmap")
    with pytest.raises(CrossExampleOp, match="integer 3"):
        begun(Pool(), TEXTS, per_record, by_torch, engine="vmap")


def test_integers_of_public_records_are_replaced_in_these():
    probe = [(torch.randint(4, WORDS, (9,)), i % 2) for i in range(3)]
    with pytest.raises(CrossExampleOp, match="integer 3"):
        begun(Pool(), TEXTS, per_record, by_torch, probe=probe)


def test_batches_of_ones_own_are_looked_at_too():
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.25, steps=2, expected_batch_size=8)
    for masked in (True, False):
        model = Masked(None) if masked else words("an operator")
        run = cw.privatize(model, torch.optim.SGD(model.parameters(), 0.1), plan, per_record, sampling="asserted")
        if masked:
            run.step((IDS[:4], LABELS[:4]))
        else:
            with pytest.raises(CrossExampleOp, match="integer 2"):
                run.step((IDS[:4], LABELS[:4]))


# -- models of Transformers ---------------------------------------------------------------------------------

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}


def classifier(name):
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=16, pad_token_id=39)
        return transformers.GPT2ForSequenceClassification(config)
    if name == "bart":
        config = transformers.BartConfig(
            vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=32,
        )  # fmt: skip
        return transformers.BartForConditionalGeneration(config)
    pad = 1 if name == "roberta" else 0
    config = {"bert": transformers.BertConfig, "roberta": transformers.RobertaConfig}[name](
        **SMALL, max_position_embeddings=16, pad_token_id=pad
    )
    kind = {"bert": "BertForSequenceClassification", "roberta": "RobertaForSequenceClassification"}[name]
    return getattr(transformers, kind)(config)


def longest(records, pad):
    """Padded on the right to the longest, with a mask, as a tokenizer does it."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(r["ids"]) for r in records], batch_first=True, padding_value=pad)
    masks = nn.utils.rnn.pad_sequence([torch.ones(len(r["ids"])).long() for r in records], batch_first=True)
    return {"input_ids": ids, "attention_mask": masks, "labels": torch.tensor([r["label"] for r in records])}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "bart"])
def test_models_of_transformers_still_pass(name):
    model = classifier(name).train()
    pad = model.config.pad_token_id

    def losses(m, batch):
        labels = batch.pop("labels")
        logits = m(**batch).logits
        logits = logits[:, -1] * 0 + logits[:, 0] if name == "bart" else logits
        return F.cross_entropy(logits, labels, reduction="none")

    texts = [{"ids": ids[: 4 + i % 5].tolist(), "label": i % 2} for i, ids in enumerate(IDS)]
    run, batches = begun(model, texts, losses, functools.partial(longest, pad=pad))
    run.step(next(batches))


def test_the_made_up_records_of_a_private_trainer_are_looked_at_too(tmp_path):
    def trimmed(model, batch):
        longest = int((batch["input_ids"] != 39).sum(1).max())
        hidden = model.bert(input_ids=batch["input_ids"][:, :longest]).last_hidden_state.mean(1)
        return F.cross_entropy(model.classifier(hidden), batch["labels"], reduction="none")

    records = [{"input_ids": ids, "label": torch.tensor(i % 3)} for i, ids in enumerate(IDS)]
    trainer = PrivateTrainer(
        model_of("bert")[0], arguments(tmp_path), plan=plan(), train_dataset=records, losses=trimmed,
        data_collator=PadsTo(),
    )  # fmt: skip
    with pytest.raises(CrossExampleOp, match="integer 39"):
        trainer.train()


# -- what is found ------------------------------------------------------------------------------------------


def found(*ops):
    with constants.Watch() as watch:
        for op in ops:
            op(torch.randint(0, 5, (6, 9)))
    return list(watch.found)


def test_what_is_found():
    table, scores = torch.randn(9, 2), torch.randn(6, 5)
    assert found(lambda x: x == 4, lambda x: torch.ne(x, 5), lambda x: x != np.int64(6)) == [4, 5, 6]
    assert found(lambda x: torch.tensor(7) == x, lambda x: torch.isin(x, torch.tensor([8, 9]))) == [7, 8, 9]
    assert found(lambda x: F.embedding(x, table, 3), lambda x: F.embedding(x, table, padding_idx=-1)) == [3, 8]
    assert found(lambda x: F.embedding_bag(x, table, padding_idx=4)) == [4]
    assert found(lambda x: F.cross_entropy(scores, x[:, 0])) == [-100]
    assert found(lambda x: F.nll_loss(scores, x[:, 0], ignore_index=4)) == [4]


def test_what_is_none():
    assert found(lambda x: x.float() == 4, lambda x: (x > 0) == 3, lambda x: x == torch.arange(9)) == []
    assert found(lambda x: x == 2**31 - 1, lambda x: x > 5, lambda x: x == 2.5, lambda x: x.eq(True)) == []


def test_where_an_integer_is_put():
    x = torch.zeros(9, dtype=torch.int64)
    rows = [with_integer((x, 1), 2, number) for number in range(5)]
    assert [(row == 2).nonzero()[:, 0].tolist() for row, _ in rows] == [[], [5, 6, 7, 8], [0, 1, 2], [1, 5], [7, 8]]
    assert [label for _, label in rows] == [1, 2, 1, 2, 1]
    assert with_integer((x, 1), 2, 1, only=1)[1] == 2
    assert not with_integer((x, 1), 2, 1, only=1)[0].any()
    assert with_integer({"a": [1, 1], "b": True, "c": np.zeros(2)}, 1, 4)["a"] == [0, 1]


def test_too_many_are_named_in_a_warning(monkeypatch):
    monkeypatch.setattr(integers, "_MOST", 2)

    def losses(model, batch):
        seen = ((batch[0] != 3) & (batch[0] != 4) & (batch[0] != 5))[..., None]
        return model.head((model.table(batch[0]) * seen).mean(1)).square().sum(1)

    with pytest.warns(UserWarning, match=r"hold 3, 4, but not 5, which"):
        begun(Tagger(), (IDS, LABELS), losses)
