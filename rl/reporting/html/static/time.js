// Where the time of a step went, and how much of the machine was used.
"use strict";
(() => {
  const { el, number, duration, percent } = relay;
  const COLORS = { generate: "--t-generate", score: "--t-reward", train: "--t-forward_backward", publish: "--t-push" };
  const SPARE = ["--t-optim", "--t-pull", "--t-checkpoint", "--t-pack", "--t-evaluate"];
  const LIMITS = {
    decode: ["decoding", "of the limit: the tokens that the generators could draw meanwhile"],
    train: ["training", "of the limit: what the trainer's devices could compute meanwhile"],
    sync: ["weight sync", "of the limit: the bytes that could be copied meanwhile"],
  };
  const LIMIT =
    "The limit is the fastest speed that was measured on this machine before the run: memory reads for decoding, matrix products for training, copies for the weights. 100% would mean that nothing else took time; only other hardware, or less to do, would be faster.";

  relay.time = (host) =>
    relay.perRun(host, (run, i, body) => {
      const { breakdown, bottleneck } = run;
      const names = Object.keys(breakdown.parts);
      if (!names.length) {
        body.append(el("p.empty", {}, "No step is done, so there is nothing to show of its time."));
        return;
      }
      if (bottleneck) body.append(el("p.bottleneck", {}, el("b", {}, "Bottleneck: "), bottleneck.sentence, bottleneck.setting ? el("code", {}, bottleneck.setting) : null));
      const colors = colorsOf(names);
      const columns = el(".columns");
      columns.append(
        el(".card", {}, el("h3", {}, `A step takes ${duration(breakdown.step_s)}`), el(".card-note", {}, "mean; what the loop waited for"), stack(breakdown, names, colors), table(breakdown, names, colors)),
        el(".card", {}, el("h3", {}, "Used and idle"), shares(breakdown)),
      );
      body.append(columns, perStep(run, names, colors));
    });

  const colorsOf = (names) => {
    const spare = [...SPARE];
    return Object.fromEntries(names.map((name) => [name, COLORS[name] || spare.shift() || "--t-other"]));
  };

  const stack = (breakdown, names, colors) =>
    el(
      ".stack",
      {},
      names.map((name) => {
        const share = breakdown.parts[name] / breakdown.step_s;
        return el("i", { style: `flex:${Math.max(share, 0.002)};background:var(${colors[name]})`, title: `${name}: ${duration(breakdown.parts[name])}` }, share > 0.12 ? `${name} ${percent(share)}` : "");
      }),
    );

  const table = (breakdown, names, colors) =>
    el(
      "table.plain",
      {},
      names.map((name) =>
        el("tr", {}, el("td", {}, el("span.swatch", { style: `background:var(${colors[name]})` }), name), el("td.num", {}, duration(breakdown.parts[name])), el("td.num", {}, percent(breakdown.parts[name] / breakdown.step_s))),
      ),
      Object.entries(breakdown.beside).map(([name, seconds]) =>
        el("tr.beside", {}, el("td", {}, el("span.swatch", { style: "background:transparent" }), name === "eval" ? "one evaluation" : `${name}, within it`), el("td.num", {}, duration(seconds)), el("td")),
      ),
    );

  const shares = (breakdown) => {
    const rows = [];
    for (const [name, [label, of]] of Object.entries(LIMITS))
      if (name in breakdown.limits)
        rows.push(row(label, breakdown.limits[name], "var(--good)", of, LIMIT));
    if ("idle" in breakdown.limits) rows.push(row("devices idle", breakdown.limits.idle, "var(--c-orange)", "share of the step, trainer and generators"));
    for (const [role, share] of Object.entries(breakdown.idle)) rows.push(row(`${role} idle`, share, "var(--t-wait-strong)", "share of the step"));
    return rows.length ? el(".shares", {}, rows) : el("p.empty", {}, "This run measured neither limits nor idle time.");
  };

  const row = (label, share, color, note, title = null) =>
    el(".share", { title }, el("span.share-label", {}, label), relay.percentBar(share, color), el("span.card-note", {}, note));

  // Stacked areas, the largest part at the bottom.
  const perStep = (run, names, colors) => {
    const host = el("div");
    const box = el(".card", {}, el("h3", {}, "Seconds of each step"), host, el(".legend", {}, names.map((name) => el("span", {}, el("span.swatch", { style: `background:var(${colors[name]})` }), name))));
    relay.block(run.blocks.curves).then(({ xs, series }) => {
      const found = names.map((name) => [name, series[`time/${name}_s`]]).filter(([, curve]) => curve);
      if (!found.length) return;
      const x = xs[found[0][1].x];
      const parts = found.filter(([, curve]) => xs[curve.x].length === x.length).map(([name, curve]) => ({ label: name, color: colors[name], y: curve.y }));
      relay.stackedChart(host, { x, parts, height: 190 });
    });
    return box;
  };
})();
