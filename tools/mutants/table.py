"""One-line faults, and the tests that should catch each (`python -m tools.mutants`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FAST = "not medium and not slow and not browser and not rehearsal"


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault: a fragment of a file, which occurs once, and what replaces it."""

    file: str
    original: str
    faulty: str
    tests: tuple[str, ...]
    """Test files, or folders of them, of which one should fail."""
    marker: str = FAST

    @property
    def texts(self) -> tuple[str, ...]:
        return self.file, self.original, self.faulty, *self.tests


def find_stale(root: Path) -> list[str]:
    """Return what is wrong with rows that no longer fit the tree, a line for each."""
    stale = []
    for mutant in MUTANTS:
        file = root / mutant.file
        num = file.read_text().count(mutant.original) if file.is_file() else 0
        if num != 1:
            stale.append(f"{mutant.file}: {mutant.original!r} occurs {num} times: must occur once")
        stale += [f"{mutant.file}: there is no {test}" for test in mutant.tests if not (root / test).exists()]
    return stale


def _row(file: str, original: str, faulty: str, *tests: str, marker: str = FAST) -> Mutant:
    return Mutant(file=file, original=original, faulty=faulty, tests=tests, marker=marker)


MUTANTS = (
    _row(
        "losses/ops.py",
        "return mask_T & torch.isfinite(generator_logprobs_T)",
        "return mask_T",
        "tests/losses/test_policy.py",
    ),
    _row(
        "losses/ops.py",
        "return torch.where(valid_T, weighted_T, 0.0).sum()",
        "return weighted_T.sum()",
        "tests/losses/test_policy.py",
    ),
    _row(
        "losses/ops.py",
        "return torch.expm1(d_T) - d_T",
        "return torch.expm1(d_T) + d_T",
        "tests/losses/test_policy.py",
    ),
    _row(
        "losses/ops.py",
        "return logprobs_T - reference_logprobs_T",
        "return reference_logprobs_T - logprobs_T",
        "tests/losses/test_policy.py",
    ),
    _row(
        "losses/ops.py",
        "return 0.5 * (logprobs_T - reference_logprobs_T).square()",
        "return (logprobs_T - reference_logprobs_T).square()",
        "tests/losses/test_policy.py",
    ),
    _row("losses/ops.py", "count *= self.tokens_per_sequence", "pass", "tests/losses/test_policy.py"),
    _row(
        "losses/ops.py",
        'if self.normalization == "sequence_mean" else None',
        'if self.normalization == "token_mean" else None',
        "tests/losses/test_policy.py",
    ),
    _row(
        "losses/policy.py",
        "loss_sum = -masked_sum(values_T, valid_T, shares_T=shares_T)",
        "loss_sum = masked_sum(values_T, valid_T, shares_T=shares_T)",
        "tests/losses/test_policy.py",
    ),
    _row(
        "losses/policy.py",
        "values=torch.minimum(plain_T, clipped_T), ratios=ratios_T",
        "values=torch.maximum(plain_T, clipped_T), ratios=ratios_T",
        "tests/losses/test_policy.py",
    ),
    _row(
        "losses/policy.py",
        "ratios_T.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)",
        "ratios_T.clamp(1.0 - self.clip_high, 1.0 + self.clip_low)",
        "tests/losses/test_policy.py",
    ),
    _row(
        "losses/policy.py",
        "weights_T = self.clip(ratios_T).detach()",
        "weights_T = self.clip(ratios_T)",
        "tests/losses/test_policy.py",
    ),
    _row(
        "losses/policy.py",
        "loss_sum = loss_sum - self.entropy_coef",
        "loss_sum = loss_sum + self.entropy_coef",
        "tests/losses/test_policy.py",
    ),
    _row("losses/policy.py", "kl_T = corrected.weights * kl_T", "pass", "tests/losses/test_correction.py"),
    _row(
        "losses/policy.py",
        "counted_T = valid_T & (corrected.weights != 0.0)",
        "counted_T = valid_T",
        "tests/losses/test_correction.py",
    ),
    _row(
        "losses/policy.py",
        "return ratios_T * kl_T if self.kl_importance_weighted else kl_T",
        "return kl_T",
        "tests/losses/test_policy.py",
    ),
    _row(
        "losses/correction.py",
        "weights_T = weights_T.clamp(max=self.high)",
        "pass",
        "tests/losses/test_correction.py",
    ),
    _row(
        "losses/correction.py",
        "outside_T = (rho_T < self.low) | (rho_T > self.high)",
        "outside_T = rho_T > self.high",
        "tests/losses/test_correction.py",
    ),
    _row(
        "losses/correction.py",
        "proximal_T - inputs.generator_logprobs, 0.0)",
        "inputs.generator_logprobs - proximal_T, 0.0)",
        "tests/losses/test_correction.py",
    ),
    _row(
        "rl/config/tree.py",
        '(at_least, operator.ge, "at least")',
        '(at_least, operator.gt, "at least")',
        "tests/config/test_tree.py",
        "tests/rollouts/test_settings.py",
    ),
    _row(
        "rl/config/tree.py",
        '(below, operator.lt, "below")',
        '(below, operator.le, "below")',
        "tests/config/test_tree.py",
        "tests/rollouts/test_settings.py",
        "tests/observability/test_sinks.py",
    ),
    _row(
        "rl/config/tree.py",
        "value = changes.get(entry.path, entry.value)",
        "value = entry.value",
        "tests/config/test_tree.py",
    ),
    _row(
        "rl/config/tree.py",
        "if getattr(built, name) is not value:",
        "if False:",
        "tests/config/test_tree.py",
        "tests/config/test_configurable.py",
    ),
    _row(
        "rl/loop/loop.py",
        "on_policy=not staleness.any()",
        "on_policy=staleness.any()",
        "tests/loop/test_loop.py",
    ),
    _row(
        "rl/loop/loop.py",
        'if config.long_samples == "drop_group" else None',
        'if config.long_samples == "drop" else None',
        "tests/loop/test_loop.py",
    ),
    _row(
        "rl/loop/loop.py",
        "drop_equal=config.drop_zero_advantage_groups",
        "drop_equal=False",
        "tests/loop/test_loop.py",
    ),
    _row(
        "rl/loop/loop.py",
        'drop_long_prompts=config.long_prompts == "drop"',
        "drop_long_prompts=False",
        "tests/loop/test_loop.py",
    ),
    _row(
        "rl/loop/loop.py",
        "self._adds_proximal_logprobs = proximal_logprobs and config.num_minibatches > 1",
        "self._adds_proximal_logprobs = False",
        "tests/loop/test_loop.py",
    ),
    _row(
        "rl/loop/loop.py",
        "self._progress.step_of_version[policy_version] = step",
        "self._progress.step_of_version[policy_version] = step - 1",
        "tests/loop/test_loop.py",
        "tests/loop/test_async_loop.py",
    ),
    _row(
        "rl/loop/loop.py",
        "if gradient.logprob_diff_mean > self.config.max_logprob_diff:",
        "if False:",
        "tests/loop/test_loop.py",
    ),
    _row(
        "rl/loop/batch.py",
        "minibatches[p // width][p, g] = sample",
        "minibatches[p % width][p, g] = sample",
        "tests/loop/test_batch.py",
    ),
    _row(
        "rl/loop/batch.py",
        "rewards_C - kl_reward.coef * next(known)",
        "rewards_C + kl_reward.coef * next(known)",
        "tests/loop/test_batch.py",
    ),
    _row(
        "rl/loop/batch.py",
        "if len(s.token_ids) <= limit}",
        "if len(s.token_ids) < limit}",
        "tests/loop/test_batch.py",
    ),
    _row(
        "rl/loop/batch.py",
        "if sample.proximal_logprobs is not None:",
        "if False:",
        "tests/loop/test_batch.py",
    ),
    _row(
        "rl/loop/metrics.py",
        "total += num_generated * num_before + num_generated * (num_generated - 1) // 2",
        "total += num_generated * num_before + num_generated * num_generated // 2",
        "tests/loop/test_metrics.py",
    ),
    _row("rl/loop/metrics.py", '"trainer": step_s - self.laps_s["train"]', '"trainer": step_s', "tests/loop"),
    _row(
        "rl/loop/metrics.py",
        "until=min(now_s(), max(group.generated_at for group in batch.groups))",
        "until=min(group.generated_at for group in batch.groups)",
        "tests/loop",
    ),
    _row(
        "rl/loop/state.py",
        "self.num_empty_steps = 0 if has_gradient else self.num_empty_steps + 1",
        "self.num_empty_steps = 0",
        "tests/loop/test_loop.py",
    ),
    _row("rl/loop/state.py", "wait=wait or last", "wait=wait", "tests/loop", "tests/runs/test_refusals.py"),
    _row("rl/loop/sync.py", "await asyncio.shield(self._push)", "pass", "tests/loop/test_async_loop.py"),
    _row(
        "rl/loop/config.py",
        "return step % self.publish_every == 0 or self.evaluates(step)",
        "return step % self.publish_every == 0",
        "tests/loop",
    ),
    _row(
        "rl/rollouts/advantage.py",
        "values - mean for values, mean in",
        "values + mean for values, mean in",
        "tests/rollouts/test_advantage.py",
    ),
    _row(
        "rl/rollouts/advantage.py",
        "float(values.std(ddof=1)) + self.eps",
        "float(values.std()) + self.eps",
        "tests/rollouts/test_advantage.py",
    ),
    _row(
        "rl/rollouts/advantage.py",
        "return np.cumsum(rewards_C[::-1])[::-1]",
        "return np.cumsum(rewards_C)",
        "tests/rollouts/test_advantage.py",
    ),
    _row(
        "rl/rollouts/advantage.py",
        "share = (num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens",
        "share = (num_tokens - max_tokens) / buffer_tokens",
        "tests/rollouts/test_advantage.py",
    ),
    _row(
        "rl/rollouts/staleness.py",
        "num_left += self._num_outstanding[last_step] - num",
        "num_left += self._num_outstanding[last_step]",
        "tests/rollouts/test_staleness.py",
    ),
    _row(
        "rl/rollouts/staleness.py",
        "last_step = self.served + self.max_off_policy_steps + 1",
        "last_step = self.served + self.max_off_policy_steps + 2",
        "tests/rollouts/test_staleness.py",
    ),
    _row(
        "rl/rollouts/staleness.py",
        "ages = {version: step - 1 - published",
        "ages = {version: step - published",
        "tests/rollouts/test_staleness.py",
    ),
    _row(
        "rl/rollouts/producer.py",
        "self.bound.release(group.number)",
        "pass",
        "tests/loop/test_loop.py",
        "tests/loop/test_async_loop.py",
    ),
    _row("rl/rollouts/producer.py", "self._dropped_in_row.clear()", "pass", "tests/loop", "tests/rollouts"),
    _row(
        "rl/rollouts/producer.py",
        'return "equal" if drop_equal and equal_rewards(group.scored) else None',
        'return "equal" if drop_equal else None',
        "tests/rollouts/test_group.py",
    ),
    _row(
        "rl/rollouts/group.py",
        "seed=self.seed * 1_000_003 + number",
        "seed=self.seed",
        "tests/rollouts/test_group.py",
    ),
    _row(
        "rl/rollouts/group.py", 'session=f"problem {number}"', "session=None", "tests/rollouts/test_group.py"
    ),
    _row(
        "rl/rollouts/group.py",
        "rewards_C[-1] -= turn.observation.reward",
        "pass",
        "tests/rollouts/test_group.py",
    ),
    _row(
        "rl/rollouts/group.py",
        "num_tokens = max_tokens if rollout.is_truncated else len(rollout.completion.token_ids)",
        "num_tokens = len(rollout.completion.token_ids)",
        "tests/rollouts/test_group.py",
    ),
    _row(
        "rl/rollouts/episode.py",
        'key = f"{seed} problem {problem.id} sample {sample} turn {turn}"',
        'key = f"{seed} problem {problem.id} turn {turn}"',
        "tests/rollouts/test_episode.py",
    ),
    _row(
        "rl/rollouts/episode.py",
        "if len(turns) >= self.limits.max_turns:",
        "if len(turns) > self.limits.max_turns:",
        "tests/rollouts/test_episode.py",
    ),
    _row(
        "rl/rollouts/episode.py",
        "room = self.limit - sum(map(len, tokens)) - len(prompt_ids)",
        "room = self.limit - sum(map(len, tokens))",
        "tests/rollouts/test_episode.py",
    ),
    _row(
        "rl/rollouts/environment.py",
        "    async with timer:\n        return cast(ResultT, await _continue",
        "    if True:\n        return cast(ResultT, await _continue",
        "tests/rollouts/test_environment.py",
    ),
    _row(
        "rl/rollouts/evaluation.py",
        "num_samples=1, seed=None)",
        "num_samples=1)",
        "tests/rollouts/test_evaluation.py",
    ),
    _row(
        "rl/rollouts/evaluation.py",
        "count = len(good) if name == ENVIRONMENT else len(values)",
        "count = len(values)",
        "tests/rollouts",
        "tests/loop/test_metrics.py",
    ),
    _row(
        "rl/rollouts/evaluation.py",
        "math.comb(num_samples - num_correct, k)",
        "math.comb(num_correct, k)",
        "tests/rollouts/test_evaluation.py",
    ),
    _row(
        "rl/rollouts/samples.py",
        "spread_T[mask] = np.concatenate(values)",
        "spread_T[~mask] = prompt",
        "tests/rollouts/test_samples.py",
    ),
    _row(
        "rl/rollouts/samples.py",
        "mask[0] = False  # the first token is never a target",
        "pass",
        "tests/rollouts/test_samples.py",
    ),
    _row(
        "rl/rollouts/packing.py",
        "heapq.heappush(load, (tokens + size, rank))",
        "heapq.heappush(load, (tokens, rank))",
        "tests/rollouts/test_packing.py",
    ),
    _row(
        "rl/rollouts/packing.py",
        "if len(micro_batches[place]) < max_sequences else 0",
        "if True else 0",
        "tests/rollouts/test_packing.py",
    ),
    _row(
        "rl/rollouts/packing.py",
        "values_T[piece.rows] = values[piece.begin + shift : piece.end + shift]",
        "values_T[piece.rows] = values[piece.begin : piece.end]",
        "tests/rollouts/test_packing.py",
    ),
    _row(
        "rl/rollouts/rubric.py",
        "reward = sum(float(c.weight) * values[c.name] for c in graded) + environment_reward",
        "reward = sum(values[c.name] for c in graded) + environment_reward",
        "tests/rollouts/test_rubric.py",
    ),
    _row(
        "rl/rollouts/judge.py",
        "temperature=self.temperature,",
        "temperature=1.0,",
        "tests/rollouts/test_judge.py",
    ),
    _row("rl/rollouts/judge.py", 'if reason == "length":', "if False:", "tests/rollouts/test_judge.py"),
    _row(
        "rl/tasks/sum_digits.py",
        'return " ".join(sorted(problem.id.removeprefix(ID_PREFIX).split("-")))',
        "return problem.id",
        "tests/tasks/test_generated.py",
    ),
    _row(
        "rl/tasks/sum_digits.py",
        "return not rollout.completion.is_cut_off and parse_answer",
        "return parse_answer",
        "tests/tasks/test_generated.py",
    ),
    _row(
        "rl/tasks/generated.py",
        "next((p for p in drawn if not self.is_held_out(p)), None)",
        "next(iter(drawn), None)",
        "tests/tasks/test_generated.py",
    ),
    _row(
        "rl/tasks/generated.py",
        'return self._not_held_out(self.draw, random.Random(f"train-{seed}"))',
        'return self._not_held_out(self.draw, random.Random("train"))',
        "tests/tasks/test_generated.py",
    ),
    _row(
        "rl/tasks/countdown.py",
        "if value.denominator == 1 and 1 <= value <= self.config.max_target:",
        "if 1 <= value <= self.config.max_target:",
        "tests/tasks/test_countdown.py",
    ),
    _row(
        "rl/tasks/countdown.py",
        'text = f"({text}){sign}{number}" if i and sign in "*/" else f"{text}{sign}{number}"',
        'text = f"{text}{sign}{number}"',
        "tests/tasks/test_countdown.py",
    ),
    _row(
        "rl/utils/numbers.py",
        'sign = "-" if "-" in (match["sign"] or "") else ""',
        'sign = ""',
        "tests/utils/test_numbers.py",
    ),
    _row(
        "rl/utils/files.py",
        "while num_written < len(data):",
        "if num_written < len(data):",
        "tests/utils/test_files.py",
        "tests/observability/test_full_disk.py",
    ),
    _row("rl/utils/files.py", "temporary.replace(path)", "pass", "tests/utils/test_files.py"),
    _row(
        "rl/utils/processes.py",
        "return identify(process.pid) == process",
        "return identify(process.pid) is not None",
        "tests/utils/test_processes.py",
        "tests/observability/test_doctor.py",
    ),
    _row(
        "rl/tools/calculator.py",
        "(left.bit_length() - 1) * right > MAX_BITS",
        "False",
        "tests/tools/test_calculator.py",
    ),
    _row(
        "rl/tools/calculator.py",
        "ast.USub: operator.neg}",
        "ast.USub: operator.pos}",
        "tests/tools/test_calculator.py",
    ),
    _row("rl/tools/environment.py", "self._num_left -= len(made)", "pass", "tests/tools/test_environment.py"),
    _row(
        "rl/tools/environment.py",
        "if len(text) <= self.max_result_chars:",
        "if True:",
        "tests/tools/test_environment.py",
    ),
    _row(
        "rl/models/rope.py",
        "return frequencies_F / self.factor",
        "return frequencies_F * self.factor",
        "tests/models/test_rope.py",
    ),
    _row(
        "rl/models/rope.py",
        "return 0.1 * scale * math.log(max(self.factor, 1.0)) + 1.0",
        "return 1.0",
        "tests/models/test_rope.py",
    ),
    _row(
        "rl/models/sampling.py",
        "logits_BV = logits_BV / sampling.temperature",
        "pass",
        "tests/models/test_generate.py",
    ),
    _row("rl/models/sampling.py", "drop_BV[:, -1] = False", "pass", "tests/models/test_generate.py"),
    _row("rl/models/sampling.py", "seen[key] += num_samples", "pass", "tests/models/test_generate.py"),
    _row(
        "rl/models/moe.py",
        "weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)",
        "pass",
        "tests/models/test_moe.py",
    ),
    _row(
        "rl/models/moe.py",
        "chosen_TK = (scores_TN.detach() + self.load_balance_bias).topk",
        "chosen_TK = scores_TN.detach().topk",
        "tests/models/test_moe.py",
        "tests/training/test_experts.py",
    ),
    _row(
        "rl/models/lora.py", "return self.alpha / self.rank", "return self.alpha", "tests/models/test_lora.py"
    ),
    _row("rl/models/lora.py", "local_tensor(adapter.lora_b).zero_()", "pass", "tests/models/test_lora.py"),
    _row("rl/models/lora.py", "model.requires_grad_(False)", "pass", "tests/models/test_lora.py"),
    _row(
        "rl/models/logprobs.py",
        "x.new_zeros(targets_T.size(0), *x.shape[1:]).index_copy(0, rows_R, x)",
        "x.new_zeros(targets_T.size(0), *x.shape[1:])",
        "tests/models/test_logprobs.py",
    ),
    _row("rl/distributed/stages.py", "return size - rank", "return size", "tests/distributed/test_stages.py"),
    _row(
        "rl/distributed/stages.py",
        "return [stage for stage, owner in enumerate(self.ranks) if owner == rank]",
        "return [stage for stage, owner in enumerate(self.ranks) if stage == rank]",
        "tests/distributed/test_stages.py",
    ),
    _row(
        "rl/training/gradients.py",
        "return 1.0 / self.denominator",
        "return 1.0",
        "tests/training/test_engine.py",
    ),
    _row(
        "rl/training/gradients.py",
        "self.denominator = (self.denominator or 0.0) + result.denominator",
        "self.denominator = result.denominator",
        "tests/training/test_engine.py",
    ),
    _row(
        "rl/training/gradients.py",
        "factor = scale * min(1.0, max_norm / (norm + 1e-6))",
        "factor = scale",
        "tests/training/test_engine.py",
    ),
    _row(
        "rl/training/optimizer.py",
        '"weight_decay": self.config.weight_decay,',
        '"weight_decay": 0.0,',
        "tests/training/test_optimizer.py",
    ),
    _row(
        "rl/training/optimizer.py",
        "settings |= {name: value for name, value in given.items() if value is not None}",
        "pass",
        "tests/training/test_optimizer.py",
    ),
    _row(
        "rl/training/optimizer.py",
        'make = torch.optim.Adam if config.name == "Adam" else torch.optim.AdamW',
        "make = torch.optim.Adam",
        "tests/training/test_optimizer.py",
    ),
    _row(
        "rl/training/checkpoint_files.py",
        '_STEP = re.compile(r"step-(0|[1-9][0-9]*)")',
        '_STEP = re.compile(r"step-([1-9][0-9]*)")',
        "tests/training/test_checkpoint.py",
        "tests/training/test_checkpoint_config.py",
    ),
    _row(
        "rl/training/checkpoint_files.py",
        "dict(sorted((int(match[1]), path)",
        "dict(sorted((match[1], path)",
        "tests/training/test_checkpoint.py",
        "tests/training/test_checkpoint_config.py",
    ),
    _row(
        "rl/weights/checksum.py",
        "rows = (rows[:, None] * np.uint64(whole) + steps).ravel()",
        "rows = (rows[:, None] + steps).ravel()",
        "tests/weights/test_checksum.py",
    ),
    _row(
        "rl/weights/boxes.py",
        "slice(start - base, start - base + size)",
        "slice(start - base, start + size)",
        "tests/weights/test_boxes.py",
    ),
    _row(
        "rl/observability/metrics.py",
        "return Mean(self.sum + other.sum, self.count + other.count)",
        "return Mean(self.sum + other.sum, self.count)",
        "tests/observability/test_metrics.py",
    ),
    _row(
        "rl/observability/metrics.py",
        "math.nan if math.isnan(other.value) else max(self.value, other.value)",
        "max(self.value, other.value)",
        "tests/observability/test_metrics.py",
    ),
    _row(
        "rl/observability/spans.py",
        "self._policy_version = version",
        "pass",
        "tests/observability/test_spans.py",
    ),
    _row(
        "rl/observability/recorder.py",
        "if p < num or any(map(_is_odd, group.scores))",
        "if p < num",
        "tests/observability/test_recorder.py",
    ),
    _row(
        "rl/observability/sinks.py",
        "self._jobs.put_nowait(job)",
        "self._jobs.put(job)",
        "tests/observability/test_sinks.py",
    ),
    _row(
        "rl/observability/sinks.py",
        "        for thread in self.threads:\n            thread.write(record)\n",
        "        for thread in self.threads:\n            thread._logger.write(1, {}, row=0)\n",
        "tests/observability/test_sinks.py",
    ),
    _row(
        "rl/observability/bottleneck.py",
        'return not steps and not value_at(config, "launch.share_gpus")',
        "return not steps",
        "tests/observability/test_bottleneck.py",
    ),
    _row(
        "rl/observability/timeline.py",
        'end_s = start_s + float(event["dur"]) / 1e6',
        "end_s = start_s",
        "tests/observability/test_timeline.py",
        "tests/observability/test_spans.py",
    ),
    _row(
        "rl/reporting/evidence.py",
        "return self._of(i for i, s in enumerate(self.steps) if s < step)",
        "return self._of(i for i, s in enumerate(self.steps) if s >= step)",
        "tests/reporting",
    ),
    _row(
        "rl/reporting/reward_rules.py",
        "won = [reply for reply in wrong if reply.wins]",
        "won = [reply for reply in wrong if not reply.wins]",
        "tests/reporting/test_findings.py",
    ),
    _row("rl/tinker/codec.py", "top_p=params.top_p,", "top_p=1.0,", "tests/tinker/test_sampling.py"),
    _row(
        "rl/tinker/codec.py",
        "top_k=min(max(0, params.top_k), base.vocab_size),",
        "top_k=0,",
        "tests/tinker/test_sampling.py",
    ),
    _row(
        "rl/tinker/codec.py",
        "temperature=params.temperature,",
        "temperature=1.0,",
        "tests/tinker/test_sampling.py",
    ),
    _row(
        "rl/tinker/datums.py",
        "weight_decay=params.weight_decay,",
        "weight_decay=None,",
        "tests/tinker/test_training.py",
    ),
    _row(
        "rl/tinker/datums.py",
        "betas=(params.beta1, params.beta2),",
        "betas=(params.beta2, params.beta1),",
        "tests/tinker/test_training.py",
    ),
    _row(
        "rl/tinker/auth.py",
        "self._held[owner] + amount > self._free - amount",
        "self._held[owner] + amount > self._free",
        "tests/tinker/test_http.py",
    ),
    _row(
        "rl/tinker/auth.py",
        "if self._hosts is not None and _without_port(host) not in self._hosts:",
        "if False:",
        "tests/tinker/test_http.py",
        "tests/security/test_server.py",
    ),
    _row(
        "rl/tinker/auth.py",
        "if len(body) + len(chunk) > most:",
        "if False:",
        "tests/tinker/test_http.py",
        "tests/security/test_server.py",
    ),
    _row(
        "rl/tinker/auth.py",
        "self._requests.give_back(owner, 1)",
        "pass",
        "tests/tinker/test_http.py",
        "tests/security/test_server.py",
    ),
    _row(
        "rl/tinker/turns.py",
        "self._waiting[owner] = own",
        "self._waiting = {owner: own, **self._waiting}",
        "tests/tinker/test_sampling.py",
        "tests/tinker/test_streams.py",
    ),
    _row(
        "rl/tinker/storage.py",
        "if not _MODEL_ID.fullmatch(form[1]) or not _NAME.fullmatch(form[2]):",
        "if False:",
        "tests/tinker/test_storage.py",
    ),
    _row(
        "actors/router.py",
        "self._replica_of_session[session] = replica",
        "pass",
        "tests/actors/test_router.py",
    ),
    _row(
        "actors/router.py",
        "self._replica_of_session.popitem(last=False)",
        "self._replica_of_session.popitem()",
        "tests/actors/test_router.py",
    ),
    _row(
        "actors/router.py",
        "self.num_running[replica] -= sampling.num_samples * len(places)",
        "pass",
        "tests/actors/test_router.py",
    ),
    _row(
        "actors/router.py",
        "least_loaded = min(up, key=lambda number: self.num_running[number])",
        "least_loaded = max(up, key=lambda number: self.num_running[number])",
        "tests/actors/test_router.py",
    ),
    _row(
        "actors/router.py",
        "begun=None if begun is None else [begun[place] for place in places],",
        "begun=begun,",
        "tests/actors/test_router.py",
        "tests/actors/test_pool.py",
    ),
    _row(
        "actors/deaths.py",
        "if not death.done() and not dead.isdisjoint(processes):",
        "if not death.done():",
        "tests/actors/test_deaths.py",
    ),
    _row("actors/deaths.py", "self._num_watches[process] -= 1", "pass", "tests/actors/test_deaths.py"),
    _row(
        "actors/pool.py",
        "if version in self._expected and not self._expected[version].done():",
        "if version in self._expected:",
        "tests/actors/test_pool.py",
    ),
    _row(
        "actors/pool.py",
        "check_sums(version=version, pushed=snapshot.sums, pulled=pulled)",
        "pass",
        "tests/actors/test_pool.py",
    ),
    _row(
        "actors/recovery.py",
        "if now_s - at < config.window_s]",
        "if True]",
        "tests/actors/test_pool.py",
        "tests/actors/test_cluster.py",
    ),
    _row(
        "actors/recovery.py",
        "min(config.pause_s * 2**doublings, config.max_pause_s)",
        "config.pause_s",
        "tests/actors/test_pool.py",
    ),
    _row(
        "actors/parity.py",
        "np.abs(logprobs_T - expected_T)[1:]",
        "np.abs(logprobs_T - expected_T)",
        "tests/actors/test_parity.py",
    ),
    _row(
        "actors/parity.py",
        "kept = token_ids[-min(config.num_tokens, max_tokens) :]",
        "kept = token_ids[: min(config.num_tokens, max_tokens)]",
        "tests/actors/test_parity.py",
    ),
    _row(
        "actors/device_lock.py",
        'await self._call_all(self._holder, "sleep")',
        "pass",
        "tests/actors/test_device_lock.py",
    ),
    _row(
        "actors/device_lock.py",
        '        self._have_weights = False\n        await self._call_all(side, "wake")',
        '        await self._call_all(side, "wake")',
        "tests/actors/test_device_lock.py",
    ),
    _row(
        "actors/device_lock.py",
        "if self._served is not None:",
        "if False:",
        "tests/actors/test_device_lock.py",
    ),
    _row(
        "actors/placement.py",
        "return max(devices, default=-1) + 1",
        "return len(devices)",
        "tests/actors/test_placement.py",
        "tests/actors/test_devices.py",
    ),
    _row(
        "actors/placement.py",
        "threads=config.generator.num_threads,",
        "threads=config.trainer.num_threads,",
        "tests/actors/test_placement.py",
        "tests/actors/test_plan.py",
    ),
    _row(
        "actors/vllm/core.py",
        "top_p=sampling.top_p,",
        "top_p=1.0,",
        "tests/actors/test_vllm_engine.py",
        marker="medium",
    ),
    _row(
        "actors/vllm/requests.py",
        "np.concatenate([[0.0], self.prompt_logprobs, self.logprobs])",
        "np.concatenate([self.prompt_logprobs, self.logprobs, [0.0]])",
        "tests/actors/test_vllm_engine.py",
        marker="medium",
    ),
    _row(
        "configs/algorithms.py",
        "config.loop.drop_zero_advantage_groups = True",
        "pass",
        "tests/configs/test_algorithms.py",
    ),
    _row(
        "configs/algorithms.py",
        "DrGRPOLoss(tokens_per_sequence=config.loop.sampling.max_tokens), Advantage())",
        'DrGRPOLoss(tokens_per_sequence=config.loop.sampling.max_tokens), Advantage(scale="group_std"))',
        "tests/configs/test_algorithms.py",
    ),
)
