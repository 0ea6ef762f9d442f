"""Deliberate bugs: each a change of one place in the library, and the row of the fault list whose tests must see it."""

# ruff: noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """`old` stands exactly once in `file`; with `new` in its place the tests of `row` must fail."""

    row: str
    name: str
    file: str
    old: str
    new: str

    @property
    def tests(self) -> list[str]:
        """Arguments for pytest."""
        return ["tests/faults", "-k", f"test_{self.row}_"]


def mutated(mutant: Mutant) -> tuple[str, str]:
    """The source as it is, and as the mutant has it."""
    source = (ROOT / mutant.file).read_text()
    found = source.count(mutant.old)
    if found != 1:
        raise ValueError(f"{mutant.name}: its text stands {found} times in {mutant.file}")
    return source, source.replace(mutant.old, mutant.new)


MUTANTS = [
    # -- sensitivity
    Mutant("01", "non-finite examples are kept", "clipwise/clipping.py",
           "finite = torch.isfinite(norms).all(dim=1)", "finite = torch.ones_like(norms[:, 0], dtype=torch.bool)"),
    Mutant("01", "bad rows are multiplied by zero instead of selected", "clipwise/engine/products.py",
           "return x.index_fill_(0, dropped, 0) if own else x.index_fill(0, dropped, 0)", "return x"),
    Mutant("02", "squares that overflow float32 count as zero", "clipwise/engine/reduce.py",
           "norms = torch.cat(parts, dim=-1).double() if parts else wide.double()",
           "norms = torch.cat(parts, dim=-1).square().nan_to_num(posinf=0.0).sqrt().double() if parts else wide.double()"),
    Mutant("02b", "no allowance for cancellation in Gram products", "clipwise/engine/gram.py",
           "estimate = (total.clamp(min=0) + self.error * reach.square() + self.lost).sqrt()",
           "estimate = total.clamp(min=0).sqrt(); reach = 0 * reach"),
    Mutant("03", "sums in the model's own half precision", "clipwise/_types.py",
           "return torch.float64 if dtype == torch.float64 else torch.float32", "return dtype"),
    Mutant("04", "squares in half precision", "clipwise/engine/reduce.py",
           "wide = x.to(sum_dtype(x.dtype)).flatten(keep_dims) if x.dim() > keep_dims",
           "wide = (x.half().square().sqrt()).float().flatten(keep_dims) if x.dim() > keep_dims"),
    Mutant("04", "the rounding of the factor that takes the weights is not covered", "clipwise/engine/gram.py",
           "* self.unit * reach + self.rounded).square()", "* self.unit * reach).square()"),
    Mutant("04", "float32 on a CPU means what the user has set", "clipwise/engine/products.py",
           '            backend.fp32_precision = "ieee"\n', '            pass\n'),
    Mutant("04", "a convolution's bound counts the parameter's sides", "clipwise/engine/patches.py",
           "self.input.shape[3] * self.window", "self.shape[1] * self.window"),
    Mutant("04", "one place of a kernel stands for all", "clipwise/engine/patches.py",
           "functools.reduce(torch.add, shifted)", "shifted[0]"),
    Mutant("05", "AutoS without its regulariser's sign", "clipwise/rules.py",
           "lambda n: clip_norm / (n + self.gamma)", "lambda n: clip_norm / (n - self.gamma)"),
    Mutant("05", "PSAC subtracts its correction", "clipwise/rules.py",
           "lambda n: clip_norm / (n + self.r / (n + self.r))", "lambda n: clip_norm / (n - self.r / (n + self.r))"),
    Mutant("06", "tied weights without cross terms", "clipwise/engine/reduce.py",
           "return rows.square().sum((1, 2)) + 2 * cross, reach", "return rows.square().sum((1, 2)), reach"),
    Mutant("07", "only the first use of a layer counts", "clipwise/engine/contributions.py",
           "    p, d = uses[0].size\n", "    return uses[0]\n"),
    Mutant("08", "dilation is ignored", "clipwise/engine/conv.py",
           "for axis, (k, step, hop) in enumerate(zip(kernel, dilation, stride, strict=True), start=first):",
           "for axis, (k, step, hop) in enumerate(zip(kernel, [1] * len(kernel), stride, strict=True), start=first):"),
    Mutant("08", "padding tokens get a gradient", "clipwise/engine/ops.py",
           'padding = call.values.get("padding_idx")', "padding = None"),
    Mutant("09", "checkpointed functions run again unseen", "clipwise/engine/recompute.py",
           "setattr(checkpointing, name, plain)", "pass"),
    Mutant("10", "late unfreezing goes unnoticed", "clipwise/training.py",
           "if list(parameters) != self._names:", "if False:"),
    Mutant("10", "waiting gradients go unnoticed", "clipwise/clipping.py",
           "if waiting := [name for name, p in named.items() if p.grad is not None]:", "if waiting := []:"),
    Mutant("10", "the optimizer may step at any time", "clipwise/guard.py", "if not self.open:", "if False:"),
    Mutant("11", "a preflight that tolerates everything", "clipwise/engine/preflight.py",
           "if not (loss_error <= self.tolerance and norm_error <= self.tolerance):", "if False:"),
    Mutant("11", "the preflight tries one length only", "clipwise/engine/preflight.py",
           "for length in lengths(like):", "for length in ():"),
    Mutant("12", "buffers may gather statistics", "clipwise/engine/preflight.py",
           "if changed := _differing(*after):", "if changed := []:"),
    Mutant("12b", "inputs may change after their use", "clipwise/engine/tape.py",
           "if x._version != version:", "if False:"),
    Mutant("12b", "the preflight uses the private record", "clipwise/engine/probes.py",
           "    if isinstance(like, Tensor):\n        shape = list(like.shape)",
           "    if isinstance(like, Tensor):\n        return like\n        shape = list(like.shape)"),
    Mutant("13", "only the first view of an example counts", "clipwise/engine/contributions.py",
           "return _wide(use.grad).reshape(len(use.grad), *shape)",
           "return _wide(use.grad).reshape(len(use.grad), *shape) * 1.2"),
    Mutant("14", "a reduced loss passes", "clipwise/engine/gradients.py",
           "if not isinstance(losses, Tensor) or losses.shape != (size,):", "if False:"),
    Mutant("15", "the number of steps depends on the number of records", "clipwise/training.py",
           "left = self._plan.steps - self._ledger.charges", "left = self._plan.steps - self._ledger.charges - len(records) % 2"),
    Mutant("16", "padding counts", "clipwise/batch.py",
           "mask = torch.arange(rows) < stop - start", "mask = torch.arange(rows) >= 0"),
    Mutant("16", "the weights of padding are not 0", "clipwise/clipping.py",
           "weights = torch.where(mask.to(weights.device)[:, None], weights, 0.0)", "pass"),
    Mutant("02", "small gradients beside others are left out of the norm", "clipwise/engine/gradients.py",
           "parts = [*(join(grads) for grads in small(found)), *(", "parts = [*("),
    Mutant("17", "a batch can be released twice", "clipwise/training.py",
           "        self._step = None\n        number =", "        number ="),
    Mutant("18", "replace-one costs what add-or-remove-one costs", "clipwise/accounting/accountants.py",
           'relation = relations.ADD_OR_REMOVE_ONE if event.adjacency == "add_or_remove_one" else relations.REPLACE_ONE',
           "relation = relations.ADD_OR_REMOVE_ONE"),
    Mutant("19", "the statement forgets the unit", "clipwise/plan.py",
           '"unit": "one example; a person with several examples is NOT covered as one",', '"unit": "the data",'),
    # -- sampling
    Mutant("20", "empty batches are skipped", "clipwise/sampling.py",
           "        yield PoissonBatch(data, size)", "        if size:\n            yield PoissonBatch(data, size)"),
    Mutant("21", "what does not fit is dropped", "clipwise/training.py",
           "for start in range(0, size, rows):", "for start in range(0, size - size % rows, rows):"),
    Mutant("22", "any batch steps", "clipwise/training.py",
           "if not isinstance(batch, PoissonBatch) or batch not in self._issued:",
           "if not isinstance(batch, PoissonBatch):"),
    Mutant("22", "batches can be skipped", "clipwise/training.py",
           "if self._outstanding is not None and self._outstanding in self._issued:", "if False:"),
    Mutant("22b", "coins follow torch's seed", "clipwise/sampling.py",
           "key = secrets.randbits(256) if self._seed is None else self._seed", "key = torch.initial_seed()"),
    Mutant("22c", "a batch of any size is accepted", "clipwise/training.py",
           "if self._ranks.examples(step.size) > self._largest_batch:", "if False:"),
    Mutant("23", "coins with 24 bits", "clipwise/sampling.py",
           "return mine[self._coins.random(len(mine)) < self.sampling_prob]",
           "return mine[np.round(self._coins.random(len(mine)) * 2**24) / 2**24 < self.sampling_prob]"),
    Mutant("24", "every rank draws from all records", "clipwise/sampling.py",
           "[slice(self._share[0], None, self._share[1])]", ""),
    Mutant("24", "every sampler has the same coins", "clipwise/sampling.py",
           "key = secrets.randbits(256) if self._seed is None else self._seed", "key = 1"),
    # -- noise
    Mutant("25", "noise is half a percent too small", "clipwise/noise.py", "noise *= scale", "noise *= 0.995 * scale"),
    Mutant("25", "hardened noise is half a percent too small", "clipwise/noise.py",
           "rounded_gaussians(raw(len(target)), sigma * rounded_bound / step, raw)",
           "rounded_gaussians(raw(len(target)), 0.995 * sigma * rounded_bound / step, raw)"),
    Mutant("25", "parameters share their noise", "clipwise/noise.py",
           'jobs.append((f"{here}/{name}/{i}",', 'jobs.append((f"{here}/{i}",'),
    Mutant("25", "a shard gets the noise of another", "clipwise/noise.py", "first - i))", "0))"),
    Mutant("25", "steps share their noise", "clipwise/noise.py", 'here = f"{sequence}/{stream}"', "here = stream"),
    Mutant("25", "the gradient gets the total σ beside a threshold", "clipwise/training.py",
           "noise_multiplier=self._plan.gradient_noise_multiplier_at(number - 1),",
           "noise_multiplier=self._plan.noise_multiplier_at(number - 1),"),
    Mutant("26", "tails end at 5.77σ", "clipwise/noise.py",
           "noise *= scale", "noise = np.clip(noise, -5.77, 5.77); noise *= scale"),
    Mutant("26", "noise from torch's generator", "clipwise/noise.py",
           "noise = self._generator(address).standard_normal(out=buffer[: skip + len(target)])[skip:]",
           "noise = torch.randn(len(target)).double().numpy()"),
    Mutant("26", "fast noise is certified", "clipwise/privatize.py", 'if noise == "fast":', "if False:"),
    Mutant("27", "the key is a constant", "clipwise/noise.py", "self._key = secrets.token_bytes(32)", "self._key = bytes(32)"),
    Mutant("27", "a seed is not put on record", "clipwise/privatize.py", "if seed is not None:", "if False:"),
    Mutant("28", "noise is rounded to the model's dtype", "clipwise/noise.py",
           "return torch.float64 if value.dtype == torch.float64 else torch.float32", "return value.dtype"),
    Mutant("29", "hardened runs are ordinary ones", "clipwise/privatize.py",
           "source = ranks.noise(noise, seed_or_none(seed=seed))",
           'source = ranks.noise("secure", seed_or_none(seed=seed))'),
    Mutant("30", "NaN passes for a number", "clipwise/_check.py",
           "if not (math.isfinite(x) and x > 0):", "if x <= 0:"),
    Mutant("30", "δ may be 2", "clipwise/_check.py", "    if not 0 < x < 1:", "    if not 0 < x:"),
    # -- state
    Mutant("31", "released before it is charged", "clipwise/training.py",
           "        number = self._ranks.charge(self._ledger.commit)\n        noised, released = self._noised(step, number)\n",
           "        number = self._ledger.charges + 1\n        noised, released = self._noised(step, number)\n"
           "        self._ledger.commit()\n"),
    Mutant("31", "ranks do not wait for the charge of the first", "clipwise/integrations/distributed.py",
           "number = self.lead(commit)", "number = commit()"),
    Mutant("31", "charges stay in memory", "clipwise/ledger.py", "        if self.persistent:\n            self._write(entry)\n", ""),
    Mutant("32", "a resumed ledger forgets", "clipwise/ledger.py",
           "self.head, self._hash, self.charges, self.looks = state.head, state.last_hash, state.charges, state.looks",
           "self.head, self._hash, self.charges, self.looks = state.head, state.last_hash, 0, 0"),
    Mutant("33", "a copy keeps its key", "clipwise/noise.py",
           '        """A copy draws its own key: the same noise must never meet two values."""\n'
           "        return NoiseSource(self.mode, self._seed)",
           "        return self"),
    Mutant("33", "a fork keeps its parent's key", "clipwise/noise.py",
           "if os.getpid() != self._process and self._seed is None:", "if False:"),
    Mutant("34", "the hash chain is not checked", "clipwise/ledger_file.py",
           "if entry != hashed(previous, body) or json.dumps(entry, sort_keys=True).encode() != line:", "if False:"),
    Mutant("34", "a torn line is free", "clipwise/ledger_file.py",
           'torn = [{"kind": "charge", "torn": True}] if tail else []', "torn = []"),
    Mutant("34", "any ledger suits any checkpoint", "clipwise/checkpoint.py",
           'if not ledger.holds(content["ledger"]):', "if False:"),
    Mutant("35", "no lock", "clipwise/ledger.py",
           "fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass"),
    Mutant("36", "any plan goes with any ledger", "clipwise/ledger.py",
           'if state.head.get("digest") != self.plan.digest:', "if False:"),
    Mutant("37", "one step too many", "clipwise/ledger.py",
           "if used + self._reserved[kind] >= most:", "if used + self._reserved[kind] > most:"),
    Mutant("38", "a second optimizer forgets what was spent", "clipwise/privatize.py",
           "if before is not None and before.charges and ledger is not before", "if False"),
    Mutant("38", "wrapped models are taken", "clipwise/privatize.py",
           "if type(module).__name__ in _WRAPPERS or isinstance(module, torch.jit.ScriptModule):", "if False:"),
    # -- release and accounting
    Mutant("39", "a batch prints its size", "clipwise/sampling.py", 'return "PoissonBatch()"', 'return f"PoissonBatch({self._size})"'),
    Mutant("40", "the statement leaves out what it does not cover", "clipwise/statement.py",
           "            *NOT_CERTIFIED,\n", ""),
    Mutant("40", "scores are not clamped", "clipwise/evaluation.py",
           "nan_to_num(nan=0.0).clamp(0.0, 1.0)", "nan_to_num(nan=0.0)"),
    Mutant("40", "a look is noised before it is charged", "clipwise/evaluation.py",
           '    number = ledger.commit("look")\n', "    number = ledger.looks + 1\n"),
    Mutant("40", "a torn look is free", "clipwise/ledger_file.py",
           "torn = sum(bool(entry.get(\"torn\")) for entry in entries) if looks_allowed else 0", "torn = 0"),
    Mutant("40", "a model may keep what it scores", "clipwise/evaluation.py", "if _marks(model) != marks:", "if False:"),
    Mutant("41", "runs of a search may look", "clipwise/trials.py",
           "if training.plan.evaluations or training.ledger.looks:", "if False:"),
    Mutant("36", "the noise may change on the way", "clipwise/ledger.py",
           'if state.head.get("noise") != self.head["noise"]:', "if False:"),
    Mutant("45", "looks cost no arithmetic", "clipwise/statement.py", "    if plan.evaluations:\n", "    if False:\n"),
    Mutant("41", "tuning costs nothing", "clipwise/accounting/tuning.py", 
           "return _composed(run, int(search.runs), delta, search.accountant)",
           "return _composed(run, 1, delta, search.accountant)"),
    Mutant("42", "calibration stops above its target", "clipwise/accounting/calibrate.py",
           "    return high\n\n\ndef _finish", "    return low * 0.99\n\n\ndef _finish"),
    Mutant("43", "ε is rounded down", "clipwise/accounting/accountants.py",
           "found = float(_composed_pld(event, width).get_epsilon(certain))",
           "found = 0.9995 * float(_composed_pld(event, width).get_epsilon(certain))"),
    Mutant("43", "Fourier transforms are taken to be exact", "clipwise/accounting/accountants.py",
           "FOURIER = 3 * 2.0**-53", "FOURIER = 0 * 2.0**-53"),
    Mutant("44", "the threshold sees what was not noised", "clipwise/training.py",
           'return sums, observed["observed"]', "return sums, seen"),
    Mutant("44", "C has no bounds", "clipwise/thresholds.py", "return min(max(x, SMALLEST), LARGEST)", "return x"),
    Mutant("45", "arithmetic costs nothing", "clipwise/accounting/arithmetic.py",
           "return min(1.0, 2 * steps * (edge + beyond))", "return 0.0"),
    Mutant("47", "the noise is scaled by half of the sensitivity", "clipwise/training.py",
           "            sensitivity=step.sensitivity,\n", "            sensitivity=0.5 * step.sensitivity,\n"),
    Mutant("47", "the threshold's release is not noised enough", "clipwise/training.py",
           "            noise_multiplier=release.noise_multiplier,\n",
           "            noise_multiplier=0.5 * release.noise_multiplier,\n"),
    Mutant("47", "AutoV promises less than it gives", "clipwise/rules.py",
           "return _guarded(norms, lambda n: clip_norm / n)", "return _guarded(norms, lambda n: 1.2 * clip_norm / n)"),
]  # fmt: skip
