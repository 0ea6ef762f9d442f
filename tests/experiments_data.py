"""Small data sets in the layouts of the real ones, for the tests of experiments."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch


def write_idx(path: Path, values: np.ndarray) -> None:
    raw = b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Small data sets of every layout, whose classes can be told apart."""
    rng = np.random.default_rng(0)
    for name, ending in (("mnist", ""), ("fashion_mnist", ".gz")):
        (tmp_path / name).mkdir()
        for part, size in (("train", 240), ("t10k", 60)):
            labels = rng.integers(0, 10, size).astype(np.uint8)
            images = rng.integers(0, 40, (size, 28, 28)).astype(np.uint8)
            images[np.arange(size), 2 * labels, :] = 255
            write_idx(tmp_path / name / f"{part}-images-idx3-ubyte{ending}", images)
            write_idx(tmp_path / name / f"{part}-labels-idx1-ubyte{ending}", labels)
    (tmp_path / "names").mkdir()
    for language, letter in (("English", "e"), ("Greek", "g")):
        text = "\n".join(letter * int(n) + "ó" for n in rng.integers(1, 9, 60))
        (tmp_path / "names" / f"{language}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "cifar10").mkdir()
    from PIL import Image

    for file in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        strip = rng.integers(0, 255, (4, 1024, 3)).astype(np.uint8)
        Image.fromarray(strip).save(tmp_path / "cifar10" / f"{file}.png")
    for file, size in (("train", 20), ("test", 4)):
        (tmp_path / "cifar10" / f"{file}_lables.json").write_text(json.dumps([i % 10 for i in range(size)]))
    (tmp_path / "adult").mkdir()
    row = "{}, Private, 1, Bachelors, 13, Never, Sales, Wife, White, {}, 0, 0, 40, Peru, {}"
    for file, dot in (("adult.data", ""), ("adult.test", ".")):
        lines = [
            row.format(20 + i, "Male" if i % 2 else "Female", (">50K" if i % 3 else "<=50K") + dot) for i in range(9)
        ]
        (tmp_path / "adult" / file).write_text("|1x3 Cross validator\n" * bool(dot) + "\n".join(lines) + "\n")
    made_sentences(tmp_path)
    made_pairs(tmp_path)
    made_restaurants(tmp_path)
    made_images(tmp_path)
    made_resnet50(tmp_path)
    monkeypatch.setenv("CLIPWISE_DATA", str(tmp_path))
    return tmp_path


def made_images(folder: Path) -> None:
    """imagenette's and CelebA's layouts; a class is a colour."""
    from PIL import Image

    for part in ("train", "val"):
        for number, name in enumerate(("n01", "n02")):
            (folder / "imagenette" / part / name).mkdir(parents=True)
            for i in range(8):
                image = Image.new("RGB", (40, 30), (255 * number, 10 * i, 0))
                image.save(folder / "imagenette" / part / name / f"{i}.JPEG")
    (folder / "celeba" / "img_align_celeba").mkdir(parents=True)
    names = [f"{i:06d}.jpg" for i in range(12)]
    for i, name in enumerate(names):
        Image.new("RGB", (20, 24), (20 * i, 0, 0)).save(folder / "celeba" / "img_align_celeba" / name)
    rows = "".join(f"{name} {1 - 2 * (i % 2)} -1\n" for i, name in enumerate(names))
    (folder / "celeba" / "list_attr_celeba.txt").write_text(f"12\nSmiling Male\n{rows}")
    parts = "".join(f"{name} {i % 3}\n" for i, name in enumerate(names))
    (folder / "celeba" / "list_eval_partition.txt").write_text(parts)


def made_sentences(folder: Path) -> None:
    """SST-2 in its layout, and a small BERT in MiniLM's."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel

    (folder / "sst2").mkdir()
    (folder / "minilm").mkdir()
    lines = "label\tsentence\n" + "".join(f"{i % 2}\t{('bad', 'good')[i % 2]} film\n" for i in range(40))
    (folder / "sst2" / "train.tsv.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "sst2" / "dev.tsv").write_text(lines.replace("sentence", "content"))
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "good": 2, "bad": 3, "film": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "minilm" / "tokenizer.json"))
    config = BertConfig(
        vocab_size=5,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    (folder / "minilm" / "config.json").write_text(json.dumps(config.to_dict()))
    save_file(BertModel(config).state_dict(), folder / "minilm" / "model.safetensors")


def made_pairs(folder: Path) -> None:
    """GLUE's pairs of sentences, with a line that has no label."""
    three = ("entailment", "neutral", "contradiction")
    layouts = {
        "qnli": ("index\tquestion\tsentence\tlabel", ("entailment", "not_entailment"), "dev.tsv"),
        "qqp": ("id\tquestion1\tquestion2\tis_duplicate", ("0", "1"), "dev.tsv"),
        "mnli": ("index\tsentence1\tsentence2\tgold_label", three, "dev_matched.tsv"),
    }
    for name, (head, labels, dev) in layouts.items():
        (folder / name).mkdir()
        lines = [f'{i}\tgood film\tbad "film\t{labels[i % len(labels)]}' for i in range(12)]
        for file in ("train.tsv", dev):
            (folder / name / file).write_text("\n".join([head, *lines, "12\tfilm\tfilm\t-"]) + "\n")


def made_restaurants(folder: Path) -> None:
    """E2E's layout: two sentences for every set of facts."""
    (folder / "e2e").mkdir()
    rows = [
        f'"name[{name}], food[{food}], near[Café {i}]","{name} {verb} {food} food near Café {i}."'
        for i, name in enumerate(("The Eagle", "Blue Spice", "Aromi"))
        for food in ("English", "French")
        for verb in ("serves", "has")
    ]
    for file in ("trainset", "devset", "testset_w_refs"):
        (folder / "e2e" / f"{file}.csv.gz").write_bytes(gzip.compress(("mr,ref\n" + "\n".join(rows)).encode()))


def resnet50_shapes(width: int = 4) -> dict[str, tuple[int, ...]]:
    """Of every array of a ResNet-50, with `width` channels where the real one has 64."""
    found, given = {"conv1": (7, 7, 3, width)}, width
    for stage, blocks in {2: "abc", 3: "abcd", 4: "abcdef", 5: "abc"}.items():
        inner = width * 2 ** (stage - 2)
        for block in blocks:
            name = f"res{stage}{block}_branch"
            found |= {f"{name}2a": (1, 1, given, inner), f"{name}2b": (3, 3, inner, inner)}
            found[f"{name}2c"] = (1, 1, inner, 4 * inner)
            if block == "a":
                found[f"{name}1"] = (1, 1, given, 4 * inner)
            given = 4 * inner
    every = {}
    for name, shape in found.items():
        every |= {f"{name}/kernel": shape, f"{name}/bias": shape[-1:]}
        norm = "bn_conv1" if name == "conv1" else name.replace("res", "bn", 1)
        every |= {f"{norm}/{part}": shape[-1:] for part in ("gamma", "beta", "moving_mean", "moving_variance")}
    return every


def made_resnet50(folder: Path) -> None:
    """Weights as TensorFlow.js stores them, in two shards."""
    rng = np.random.default_rng(0)
    (folder / "resnet50").mkdir()
    arrays = {
        name: rng.normal(0, np.prod(shape[:3]) ** -0.5, shape) if len(shape) == 4 else rng.uniform(0.5, 1.0, shape)
        for name, shape in resnet50_shapes().items()
    }
    arrays = {name: array.astype("<f4") for name, array in arrays.items()}
    raw = b"".join(a.tobytes() for a in arrays.values())
    for k, part in enumerate((raw[:1000], raw[1000:])):
        (folder / "resnet50" / f"{k}.bin").write_bytes(part)
    listed = [{"name": name, "shape": list(a.shape), "dtype": "float32"} for name, a in arrays.items()]
    manifest = {"weightsManifest": [{"paths": ["0.bin", "1.bin"], "weights": listed}]}
    (folder / "resnet50" / "model.json").write_text(json.dumps(manifest))
