// The top of the page: the runs in a few numbers, what could not be read, and what looks wrong.
"use strict";
(() => {
  const { el, number, duration, percent } = relay;
  const STATES = {
    running: "under way",
    finished: "finished",
    stopped: "stopped",
    ended: "ended without having finished",
    unknown: "not known whether it finished",
  };

  const IDENTICAL =
    "Trainer and generator compute the logprob of each token on their own. Here both had the same bits for every token of every step, so the policy that is trained is the one that wrote the replies.";
  const DIFFERENT =
    "Trainer and generator compute the logprob of each token on their own. Rounding makes small differences: up to 1e-6 in float32, a few hundredths in bfloat16. Larger ones mean other weights or other settings.";

  relay.overview = (host) => {
    const cards = relay.runs.map(card);
    if (relay.many) {
      host.append(
        el("h1", {}, `${number(relay.runs.length)} runs`),
        el(".card.scroll", {}, table()),
        el("details.group", {}, el("summary", {}, el("b", {}, "each run in numbers")), cards),
      );
    } else host.append(...cards);
  };

  // A row for each run; runs that differ only by seed stand below the row of their band.
  const HEADS = ["run", "state", "step", "evaluation, correct", "reward, mean", "samples / s", "findings"];
  const table = () =>
    el(
      "table.plain.runs",
      {},
      el("tr", {}, HEADS.map((head) => el("th", {}, head))),
      relay.report.lines.flatMap((line, k) => {
        const rows = line.runs.map((i) => runRow(i, line.runs.length > 1));
        return line.runs.length > 1 ? [bandRow(line, k), ...rows] : rows;
      }),
    );

  const bandRow = (line, k) => {
    const facts = line.runs.map((i) => relay.runs[i].facts);
    const spread = (name) => {
      const values = facts.map((of) => of[name]?.at(-1)).filter((value) => typeof value === "number");
      if (!values.length) return "–";
      const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
      return `${fixed(mean, 3)} (${fixed(Math.min(...values), 3)} … ${fixed(Math.max(...values), 3)})`;
    };
    return el(
      "tr.band",
      { "data-line": k },
      el("td", {}, el("span.swatch", { style: `background:var(${relay.lineColor(k)})` }), el("b", {}, line.name)),
      el("td", {}, `mean of ${line.runs.length}`),
      el("td"),
      el("td", {}, spread("evaluation")),
      el("td", {}, spread("reward")),
      el("td"),
      el("td"),
    );
  };

  const runRow = (i, inBand) => {
    const run = relay.runs[i];
    const { facts } = run;
    const of = facts.num_steps ? ` of ${number(facts.num_steps)}` : "";
    const wrong = run.findings.length ? el("span.count", {}, String(run.findings.length)) : "none";
    return el(
      `tr${inBand ? ".member" : ""}`,
      { "data-run": i },
      el("td", {}, inBand ? run.name : relay.runName(i)),
      el("td", {}, el(`span.state.state-${facts.state}`, {}, STATES[facts.state])),
      el("td", {}, facts.step === null || facts.step === undefined ? "none yet" : `${number(facts.step)}${of}`),
      el("td", {}, facts.evaluation ? arrow(facts.evaluation, 3) : "–"),
      el("td", {}, facts.reward ? arrow(facts.reward, 3) : "–"),
      el("td", {}, number(facts.samples_per_s, 3)),
      el("td", {}, facts.step ? wrong : "–", run.problems.length ? el("span.hint", {}, ` · ${run.problems.length} unreadable`) : null),
    );
  };

  const card = (run, i) => {
    const { facts } = run;
    const of = facts.num_steps ? ` of ${number(facts.num_steps)}` : "";
    const sub = [
      facts.config,
      facts.model,
      facts.started ? `started ${relay.moment(facts.started)}` : null,
      run.folder,
    ].filter(Boolean);
    return el(
      "article.run",
      { "data-run": i },
      el(
        ".run-head",
        {},
        relay.compares ? el("span.swatch.big", { style: `background:var(${relay.runColor(i)})` }) : null,
        el(relay.many ? "h3" : "h1", {}, run.name),
        el(`span.state.state-${facts.state}`, {}, STATES[facts.state]),
      ),
      facts.description ? el("p.description", {}, facts.description) : null,
      el("p.sub", {}, sub.map((part) => el("span", {}, part))),
      el(
        ".tiles",
        {},
        tile("step", facts.step === null || facts.step === undefined ? "none yet" : `${number(facts.step)}${of}`, [
          `${duration(facts.training_s)} of steps`,
          facts.step_s ? `${duration(facts.step_s)} a step` : null,
        ]),
        facts.evaluation
          ? tile("evaluation, correct", arrow(facts.evaluation, 3), [
              facts.num_problems ? `${number(facts.num_problems)} held-out problems` : null,
              facts.evaluation.length < 2 ? "the only evaluation" : null,
            ])
          : null,
        facts.reward
          ? tile("reward, mean", arrow(facts.reward, 3), [facts.reward.length < 2 ? "the only step" : "first and last step"])
          : null,
        facts.samples_per_s
          ? tile("samples / s", number(facts.samples_per_s, 3), [
              `${number(facts.generated_tokens_per_s, 3)} tokens/s generated, ${number(facts.trained_tokens_per_s, 3)} trained`,
            ])
          : null,
        facts.logprob_diff_max === null || facts.logprob_diff_max === undefined
          ? null
          : tile(
              "trainer − generator",
              facts.logprob_diff_max === 0 ? "identical" : number(facts.logprob_diff_max, 3),
              [facts.logprob_diff_max === 0 ? "logprobs, bit for bit, every step" : "nats, the largest of any token"],
              "",
              facts.logprob_diff_max === 0 ? IDENTICAL : DIFFERENT,
            ),
        facts.num_lost || facts.num_went_back
          ? tile("losses", number(facts.num_lost), [
              `${number(facts.num_recovered)} recovered, went back ${facts.num_went_back} ×`,
            ], "bad")
          : null,
      ),
      run.problems.length
        ? el(
            "details.problems",
            { open: run.problems.length < 4 },
            el("summary", {}, `Not everything of this run could be read (${run.problems.length})`),
            el("ul", {}, run.problems.map((problem) => el("li", {}, problem))),
          )
        : null,
    );
  };

  const fixed = (value, digits) => (Math.abs(value) < 1000 ? String(Number(value.toFixed(digits))) : number(value));
  // Of the first and the last value; a single one has come from nowhere.
  const arrow = (values, digits) => {
    const [first, last] = values;
    return values.length < 2 ? fixed(first, digits) : [el("span.from", {}, `${fixed(first, digits)} → `), fixed(last, digits)];
  };

  const tile = (label, value, notes, kind = "", title = null) =>
    el(
      `.tile${kind ? `.${kind}` : ""}`,
      { title },
      el(".tile-label", {}, label),
      el(".tile-value", {}, value),
      notes.filter(Boolean).map((note) => el(".tile-note", {}, note)),
    );

  relay.findings = (host) =>
    relay.perRun(host, (run, i, body) => {
      if (!run.findings.length) {
        body.append(
          el(
            run.facts.num_recorded < relay.report.enough_steps ? ".healthy.unknown" : ".healthy",
            {},
            el("b", {}, verdict(run.facts)),
            run.facts.step ? ` Looked for: ${relay.report.looked_for.join(", ")}.` : "",
          ),
        );
        return;
      }
      body.append(el(".findings", {}, run.findings.map((finding, n) => findingCard(finding, n, i))));
    }, { count: (run) => run.findings.length });

  // Rules look at several steps: what a short run does not show is not absent.
  const verdict = ({ step, num_recorded }) => {
    const enough = relay.report.enough_steps;
    if (!step) return "No step is done yet.";
    if (num_recorded >= enough) return "Nothing looks wrong.";
    const done = num_recorded === 1 ? "1 step is" : `${number(num_recorded)} steps are`;
    return `Too short to tell: ${done} recorded, and some rules need ${enough}.`;
  };

  const findingCard = (finding, n, runNumber) =>
    el(
      "article.finding",
      { "data-kind": finding.kind },
      el(
        ".finding-head",
        {},
        el("span.finding-number", {}, `F${n + 1}`),
        el("h3", {}, finding.title),
        finding.since_step === null
          ? null
          : el("span.since", {}, `since step ${number(finding.since_step)}`),
      ),
      el("p", {}, finding.sentence),
      finding.advice ? el("p.advice", {}, finding.advice) : null,
      el(".evidence", {}, finding.evidence.filter((e) => e.steps).map((e) => seriesEvidence(e, finding))),
      el(".evidence", {}, finding.evidence.filter((e) => !e.steps).map((e) => rolloutEvidence(e, runNumber))),
    );

  const seriesEvidence = (evidence, finding) => {
    const host = el("div");
    const lines = [
      { label: evidence.name, x: evidence.steps, y: evidence.values, color: "--bad", points: evidence.steps.length < 16 },
    ];
    const marks = finding.since_step === null ? [] : [{ x: finding.since_step, color: "--muted" }];
    relay.chart(host, { lines, marks, height: 120 });
    return el("figure.evidence-item", {}, el("figcaption", {}, el("code", {}, evidence.name)), host);
  };

  const rolloutEvidence = (rollout, runNumber) => {
    return el(
      "button.evidence-item.quote",
      { type: "button", onclick: () => relay.openRollout(runNumber, rollout) },
      el("figcaption", {}, el("span", {}, `step ${number(rollout.step)} · ${rollout.problem} · sample ${number(rollout.sample)}`), el("span", {}, rollout.note)),
      el("blockquote", {}, rollout.text),
    );
  };

  relay.percentBar = (share, color) =>
    el(".bar", {}, el("i", { style: `width:${Math.min(100, 100 * share)}%;background:${color}` }), el("b", {}, percent(share)));
})();
