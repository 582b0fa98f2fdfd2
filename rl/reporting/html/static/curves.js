// The curves: those that tell how a run does, then every metric by its group.
"use strict";
(() => {
  const { el, number } = relay;

  // In this order, each where a run has any of its metrics: [title, note, {metric: [label, color]}].
  const HEADLINES = [
    [
      "Learning",
      "share of the step's samples, and held-out problems",
      {
        "reward/mean": ["reward, mean", "--c-grey"],
        "reward/correct": ["correct, step's samples", "--accent"],
        "eval/correct": ["correct, held-out (greedy)", "--eval"],
      },
    ],
    [
      "Trainer against generator",
      "|logprob difference| of a token, nats",
      {
        "logprob_diff/max": ["largest", "--c-orange"],
        "logprob_diff/mean": ["mean", "--accent"],
      },
    ],
    ["Entropy", "of the policy, nats a token", { "loss/entropy_mean": ["entropy", "--accent"] }],
    ["Length of replies", "tokens, mean", { "completion/tokens_mean": ["tokens", "--accent"] }],
    ["Gradient norm", "before clipping", { "loss/grad_norm": ["gradient norm", "--accent"] }],
    ["Loss", "as optimised", { "loss/mean": ["loss", "--accent"] }],
    [
      "Ratio and clipping",
      "importance ratio; share of tokens clipped",
      {
        "loss/ratio_mean": ["ratio, mean", "--accent"],
        "loss/clipped_fraction": ["clipped", "--c-orange"],
      },
    ],
    [
      "Groups without a gradient",
      "share with equal rewards",
      { "reward/equal_groups": ["equal groups", "--accent"] },
    ],
    ["Staleness of tokens", "steps since the weights that drew them", {
      "staleness/mean": ["mean", "--accent"],
      "staleness/max": ["largest", "--c-orange"],
    }],
  ];
  const SHARES = /^(reward|eval)\/(mean|correct|reward|equal_groups|answer|format|pass@)|clipped_fraction|cut_off|unfinished|padding|fill|shared|^limit\/|identical/;

  relay.curves = async (host) => {
    const { lines: drawn } = relay.report;
    const data = await Promise.all(drawn.map((of) => relay.block(of.block)));
    const line = (k, name, label, color) => {
      const curve = data[k].series[name];
      if (!curve) return null;
      return {
        metric: name,
        number: k,
        label: relay.many ? drawn[k].name : relay.compares ? `${label}, ${drawn[k].name}` : label,
        x: data[k].xs[curve.x],
        y: curve.y,
        low: curve.low,
        high: curve.high,
        num: curve.num,
        total: drawn[k].runs.length,
        color,
        dash: relay.many ? relay.lineDash(k) : k ? [6, 4] : undefined,
        points: name.startsWith("eval/"),
        smooth: !name.startsWith("eval/"),
        share: SHARES.test(name),
        bad: curve.num_bad,
      };
    };
    const linesOf = (name, label, color) => drawn.map((_, k) => line(k, name, label, color)).filter(Boolean);

    host.append(toolbar(host));
    if (relay.many) host.append(sharedLegend(drawn));
    const headlines = el(".grid.headlines");
    for (const [title, note, metrics] of relay.many ? splitByMetric(HEADLINES) : HEADLINES) {
      const entries = Object.entries(metrics);
      const lines = entries.flatMap(([name, [label, color]]) => linesOf(name, label, color));
      if (entries.length === 1) byRun(lines);
      if (lines.length) headlines.append(card(title, note, lines, marksOf(Object.keys(metrics), title === "Learning")));
    }
    host.append(headlines);
    host.append(...groups(data, linesOf));
  };

  // Of many runs each metric has a chart of its own, the evaluation first.
  const splitByMetric = (headlines) => {
    const split = headlines.flatMap(([title, note, metrics]) => {
      const entries = Object.entries(metrics);
      return entries.map(([name, of]) => [entries.length > 1 ? `${title}: ${of[0]}` : title, note, { [name]: of }]);
    });
    const isEvaluation = ([, , metrics]) => "eval/correct" in metrics;
    return [...split.filter(isEvaluation), ...split.filter((headline) => !isEvaluation(headline))];
  };

  // One legend for all charts, whose entries show and hide their line everywhere.
  const sharedLegend = (drawn) =>
    el(
      ".legend.shared",
      {},
      drawn.map(({ name, runs }, k) => {
        const toggle = (event) => {
          const shown = event.currentTarget.getAttribute("aria-pressed") !== "true";
          event.currentTarget.setAttribute("aria-pressed", String(shown));
          relay.showLine(k, shown);
        };
        const stroke = el(`i.stroke${relay.lineDash(k) ? ".dashed" : ""}${runs.length > 1 ? ".band" : ""}`, { style: `--stroke:var(${relay.lineColor(k)})` });
        const title = runs.length > 1 ? "mean of the runs, with the smallest and the largest value as a band" : "show or hide";
        return el("button.ghost", { type: "button", "aria-pressed": "true", title, "data-line": k, onclick: toggle }, stroke, name);
      }),
    );

  const toolbar = (host) =>
    el(
      ".toolbar",
      {},
      el(
        "label",
        {},
        "smoothing ",
        el("input", {
          type: "range",
          min: 0,
          max: 0.99,
          step: 0.01,
          value: relay.smoothing(),
          oninput: (event) => relay.setSmoothing(Number(event.target.value)),
        }),
      ),
      el("input", {
        type: "search",
        placeholder: "find a metric, such as loss/",
        "aria-label": "find a metric",
        oninput: (event) => filter(host, event.target.value.trim().toLowerCase()),
      }),
      el("span.hint", {}, "drag to zoom in, double-click to zoom out; all curves move together"),
      relay.compares && !relay.many
        ? el("span.hint", {}, relay.runName(0), " solid, ", relay.runName(1), " dashed")
        : null,
    );

  const filter = (host, text) => {
    for (const group of host.querySelectorAll("details.group")) {
      let shown = 0;
      for (const item of group.querySelectorAll(".card")) {
        item.hidden = Boolean(text) && !item.dataset.metric.toLowerCase().includes(text);
        shown += item.hidden ? 0 : 1;
      }
      group.hidden = !shown;
      if (text) group.open = shown > 0;
    }
  };

  // Since when something is found, on the curves that show it.
  const marksOf = (names, all = false) =>
    // Of many runs a mark would not tell whose finding it is.
    (relay.many ? [] : relay.runs).flatMap((run) =>
      run.findings.flatMap((finding, n) => {
        const shown = all || finding.evidence.some((evidence) => names.includes(evidence.name));
        return shown && finding.since_step !== null
          ? [{ x: finding.since_step, color: "--bad", label: `F${n + 1}` }]
          : [];
      }),
    );

  const card = (title, note, lines, marks, metric = title) => {
    const isSingle = lines.every((line) => line.x.length < 2);
    const host = isSingle ? single(lines) : el("div");
    const bad = lines.reduce((sum, line) => sum + (line.bad || 0), 0);
    const widen = () => {
      const wide = box.classList.toggle("wide");
      host.style.height = wide ? "360px" : "";
      if (!wide) host.style.height = `${height}px`;
    };
    const isLarge = title === "Learning" || (relay.many && note && lines[0].metric === "eval/correct");
    const height = isLarge ? 300 : 170;
    const box = el(
      `.card${isLarge ? ".large" : ""}`,
      { "data-metric": metric },
      el(
        ".card-head",
        {},
        el("h3", {}, title),
        isSingle ? null : el("span.last", {}, lastOf(lines)),
        isSingle ? null : el("button.ghost", { type: "button", title: "larger or smaller", "aria-label": `${title} larger or smaller`, onclick: widen }, "⤢"),
      ),
      note ? el(".card-note", {}, note) : null,
      host,
      !isSingle && !relay.many && lines.length > (relay.compares ? 2 : 1) ? legend(lines) : null,
      bad ? el(".card-note.bad", {}, `${number(bad)} values are not finite and left out`) : null,
    );
    if (!isSingle) relay.chart(host, { lines, marks, height });
    return box;
  };

  const valueOf = (line) => (line.y[0] === null || line.y[0] === undefined ? "not finite" : number(line.y[0], 3));

  // A single value is no curve.
  const single = (lines) =>
    el(
      ".single",
      {},
      lines.map((line) =>
        el("div", {}, el("b", {}, valueOf(line)), el("span.card-note", {}, ` at step ${number(line.x[0])}${lines.length > 1 ? `: ${line.label}` : ""}`)),
      ),
    );

  // Of one metric: the colour says which run it is of.
  const byRun = (lines) => {
    if (relay.compares) for (const line of lines) line.color = relay.lineColor(line.number);
    return lines;
  };

  const legend = (lines) =>
    el(
      ".legend",
      {},
      lines.map((line) => {
        const label = line.x.length === 1 ? `${line.label}: ${valueOf(line)} at step ${number(line.x[0])}` : line.label;
        return el("span", {}, el(`i.stroke${line.dash ? ".dashed" : ""}`, { style: `--stroke:var(${line.color})` }), label);
      }),
    );

  // Of the last metric, in each run that has it.
  const lastOf = (lines) => {
    const ofMetric = lines.filter((line) => line.metric === lines[lines.length - 1].metric);
    const values = ofMetric.map(({ y }) => y.findLast((value) => value !== null)).filter((last) => last !== undefined);
    if (values.length > 3) return `${number(Math.min(...values), 3)} … ${number(Math.max(...values), 3)}`;
    return values.map((last) => number(last, 3)).join(" · ");
  };

  const groups = (data, linesOf) => {
    const names = [...new Set(data.flatMap((of) => Object.keys(of.series)))];
    const byGroup = Map.groupBy(names, (name) => (name.includes("/") ? name.split("/")[0] : "run"));
    return [...byGroup].map(([group, members]) => {
      const grid = el(".grid");
      for (const name of members) {
        grid.append(card(name, null, byRun(linesOf(name, name, "--accent")), marksOf([name])));
      }
      return el(
        "details.group",
        {},
        el("summary", {}, el("b", {}, group), el("span.hint", {}, ` ${members.length}`)),
        grid,
      );
    });
  };
})();
