"""Sentences in and out: GLUE's pairs, E2E, BLEU and ROUGE-L; and the three kinds of labels."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments import datasets, decoder, e2e, encoder, images, losses, overlap, recipes, sentences, tables

TEXTS = ["xname is a cheap pub near xnear .", "the food is good and cheap", "a pub"]
REFERENCES = [
    ["xname is a pub near xnear .", "xname , near xnear , is a cheap pub ."],
    ["the food is cheap and good", "good and cheap food is there"],
    ["a cheap pub", "pub"],
]


def test_overlap_is_what_sacrebleu_and_rouge_score_say():
    texts, references = [t.split() for t in TEXTS], [[r.split() for r in refs] for refs in REFERENCES]
    assert overlap.bleu(texts, references) == pytest.approx(62.0328658256889)  # sacrebleu 2.5.1
    assert overlap.rouge_l(texts, references) == pytest.approx(79.65811965811966)  # rouge-score 0.1.2
    assert overlap.bleu(texts, [[t] for t in texts]) == pytest.approx(100)
    assert overlap.bleu([["a"]], [[["b"]]]) == 0
    assert overlap.rouge_l([[]], [[["b"]]]) == 0


def test_pairs_are_read_in_their_layouts(made):
    for name, classes in (("qnli", 2), ("qqp", 2), ("mnli", 3)):
        data = datasets.load(name)
        assert data.classes == classes
        assert data.train[0].shape == (12, sentences.LENGTH)  # the line without a label is left out
        assert data.test[1].tolist() == [i % classes for i in range(12)]
        assert data.train[0][0, :5].tolist() == [2, 4, 3, 1, 4]  # good film, bad ", film
    with pytest.raises(ValueError, match="no column label, question"):
        sentences.rows_of(made / "mnli" / "train.tsv", sentences.TASKS["qnli"])


def test_the_last_layer_alone_says_what_the_whole_encoder_says(made):
    """But for the halves in which its input is kept."""
    tokens, data = datasets.load("sst2"), datasets.load("sst2_last")
    assert data.train[0].shape == (40, 24, 17)
    assert data.test[0].shape == (40, sentences.LENGTH, 17)
    whole = encoder.classifier(2).eval()
    last = encoder.LastLayer(whole)
    assert {id(p) for p in last.parameters()} < {id(p) for p in whole.parameters()}
    for x, states in ((tokens.test[0], data.test[0]), (tokens.train[0][:, :24], data.train[0])):
        torch.testing.assert_close(last(states), whole(x), atol=5e-3, rtol=0)


def test_a_run_of_the_last_layer_is_watched(made, monkeypatch):
    changed = recipes.RECIPES["sst2_last"].changed({"batch_size": 10, "epochs": 3, "epsilon": 50, "delta": 0.01})
    row = recipes.run_one(changed, "auto-s", 0)
    assert len(row["gradients"]) == 2  # after steps 1 and 7 of 12
    assert all(length > 0 for length in row["gradients"])


def test_facts_then_a_sentence_of_which_only_the_sentence_is_learnt(made):
    data = datasets.load("e2e")
    (x, y), known = data.train, e2e.vocabulary()
    names = {v: k for k, v in known.items()}
    start = x[0].tolist().index(e2e.SAY)
    assert [names[w] for w in x[0, :4].tolist()] == ["name", "[", "xname", "]"]
    assert y[0, :start].tolist() == [0] * start
    said = [names.get(w, w) for w in y[0, start:].tolist() if w]
    assert said == ["xname", "serves", "english", "food", "near", "xnear", ".", e2e.END]
    assert x[0, start + 1 : start + 8].tolist() == y[0, start : start + 7].tolist()
    assert data.classes == 4 + len(known)


def test_a_place_sees_nothing_that_comes_after_it():
    torch.manual_seed(0)
    model = decoder.Decoder(11, 8, width=16, layers=2, heads=2)
    x = torch.randint(0, 11, (2, 8))
    changed = x.clone()
    changed[:, 5:] = 0
    assert torch.allclose(model(x)[:, :5], model(changed)[:, :5], atol=1e-6)
    assert not torch.allclose(model(x)[:, 5:], model(changed)[:, 5:], atol=1e-3)


def test_texts_are_written_word_by_word_until_their_end():
    class Counting(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.one_hot((x + 1) % 9, 9).float()

    found = e2e.written(Counting(), [[5], [4, 6], [0]], "cpu", most=7)
    assert found == [[6, 7, 8, 0, 1, 2], [7, 8, 0, 1, 2], [1, 2]]


def test_the_decoder_learns_to_say_what_it_read(made, monkeypatch):
    monkeypatch.setattr(e2e, "LENGTH", 32)
    recipe = recipes.RECIPES["e2e"].changed({"epochs": 30, "batch_size": 12})
    row = recipes.run_one(recipe, "non-private", 0)
    assert row["bleu"] > 50
    assert row["rouge_l"] > 60
    private = recipes.run_one(recipe.changed({"epochs": 2, "batch_size": 6, "delta": 1e-3}), "psac", 0)
    assert private["epsilon"] <= 8
    assert private["rouge_l"] < row["rouge_l"]
    assert torch.get_float32_matmul_precision() == "highest"  # as it was: the recipe trains with another


@pytest.mark.parametrize("name", ["qnli", "mnli", "celeba_all"])
def test_recipes_without_data_here_train_on_made_data(made, monkeypatch, name):
    monkeypatch.setattr(images, "CELEBA_SIDE", 16)
    small = recipes.RECIPES[name].changed({"epochs": 1, "batch_size": 2, "delta": 1e-3})
    row = recipes.run_one(small, "psac", 0)
    assert row["epsilon"] <= small.epsilon
    assert 0 <= row["accuracy"] <= 1


def test_the_table_of_texts_has_the_means_of_both_scores(tmp_path):
    rows = [
        {"method": "psac", "seed": s, "settings": {}, "device": "cpu", "bleu": 40.0 + s, "rouge_l": 50.0}
        for s in (0, 2)
    ]
    (tmp_path / "e2e.json").write_text(json.dumps({"rows": rows}))
    table = tables.text_table(tmp_path)
    assert "| PSAC, decoder from scratch | 41.00 ± 1.41 | 50.00 ± 0.00 | 2 |" in table
    assert "| 63.60 | 67.07 |" in table


def test_every_kind_of_label_has_a_loss_and_a_count():
    logits, bits = torch.tensor([[2.0, -2.0], [-2.0, 2.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert losses.right(logits, bits) == (3, 4)
    assert losses.losses(logits, bits).argmax() == 1
    assert losses.right(logits, torch.tensor([0, 0])) == (1, 2)
    places = torch.tensor([[1, 0], [1, 1]])
    both = torch.stack([logits, logits])
    assert losses.right(both, places) == (1, 3)
    by_hand = torch.nn.functional.cross_entropy(both[1], places[1])
    assert losses.losses(both, places)[1] == pytest.approx(float(by_hand))
    assert losses.losses(both, torch.zeros(2, 2, dtype=torch.long)).tolist() == [0, 0]
