// One rollout down to its tokens: what was asked, what was written, and of each token what trainer and
// generator made of it.
"use strict";
(() => {
  const { el, number, percent } = relay;
  const PER_PIECE = 3000;
  const LEAST_ADVANTAGE = 1e-9;
  const MODES = {
    advantage: "advantage",
    diff: "trainer − generator",
    logprob: "generator's probability",
    version: "policy version",
    none: "no colour",
  };
  let chosen = "advantage";
  let mode = chosen;

  // What is recorded of these turns' tokens.
  const recorded = (turns) => ({
    advantage: turns.some((turn) => turn.advantages !== undefined),
    diff: turns.some((turn) => turn.diffs),
    logprob: turns.some((turn) => turn.logprobs),
    version: turns.some((turn) => turn.versions !== undefined),
    none: true,
  });

  // Shades by value: positive, negative; light enough for the text in both themes.
  const shade = (share, color) => (share ? `color-mix(in srgb, var(${color}) ${Math.round(6 + 64 * Math.min(1, Math.abs(share)))}%, transparent)` : "");
  const VERSION_COLORS = ["--accent", "--c-orange", "--good", "--t-optim", "--t-pull"];

  const at = (values, i) => (Array.isArray(values) ? values[i] : values);

  // The scale of a rollout's colours: the largest that it has, at least what matters.
  const scaleOf = (turns) => {
    const of = (name) => turns.flatMap((turn) => (Array.isArray(turn[name]) ? turn[name] : [turn[name]])).filter((v) => typeof v === "number").map(Math.abs);
    const largest = (values, least) => values.reduce((a, b) => Math.max(a, b), least);
    return {
      advantage: largest(of("advantages"), LEAST_ADVANTAGE),
      diff: largest(of("diffs"), 1e-3),
      versions: [...new Set(of("versions"))].sort((a, b) => a - b),
    };
  };

  const background = (turn, i, scale) => {
    const value = { advantage: at(turn.advantages, i), diff: turn.diffs?.[i], logprob: turn.logprobs?.[i], version: at(turn.versions, i) }[mode];
    if (typeof value !== "number") return "";
    if (mode === "advantage") return shade(value / scale.advantage, value > 0 ? "--plus" : "--minus");
    if (mode === "diff") return shade(value === 0 ? 0 : value / scale.diff, value > 0 ? "--plus" : "--minus");
    if (mode === "logprob") return shade(1 - Math.exp(value), "--minus");
    if (mode === "version") return shade(0.4, VERSION_COLORS[scale.versions.indexOf(value) % VERSION_COLORS.length]);
    return "";
  };

  // `known`: the texts of tokens are; `again` draws it anew in another colour.
  relay.rolloutView = ({ row, turns, texts, pieces, known }, { siblings, open, again }) => {
    const scale = scaleOf(turns);
    const has = recorded(turns);
    mode = has[chosen] ? chosen : Object.keys(MODES).find((name) => has[name]);
    return el(
      ".rollout-view",
      {},
      head(row, turns[0]?.in_ledger),
      siblings.length > 1 ? siblingStrip(row, siblings, open) : null,
      colorBar(turns, has, scale, again),
      turns.map((turn, i) => turnView(turn, { texts, pieces, known, scale, number: turns.length > 1 ? (turn.number ?? i + 1) : null })),
    );
  };

  const head = (row, ledger) => {
    const parts = Object.entries(row.parts || {});
    return el(
      ".rollout-head",
      {},
      el("h3", {}, row.problem ?? "problem"),
      el(
        ".facts",
        {},
        fact("step", number(row.step)),
        fact("kind", row.kind + (row.set ? ` (${row.set})` : "")),
        fact("sample", number(row.sample)),
        fact("reward", number(row.reward), row.correct ? "plus" : row.correct === false ? "minus" : ""),
        parts.map(([name, value]) => fact(`reward · ${name}`, number(value))),
        row.advantage === null ? null : fact("advantage", number(row.advantage), row.advantage > 0 ? "plus" : row.advantage < 0 ? "minus" : ""),
        row.correct === null ? null : fact("correct", row.correct ? "yes" : "no", row.correct ? "plus" : "minus"),
        row.answer === null || row.answer === undefined ? null : fact("right answer", typeof row.answer === "string" ? row.answer : JSON.stringify(row.answer)),
        fact("tokens", number(row.tokens)),
        row.diff === null ? null : fact("largest difference", `${number(row.diff, 3)} nats`),
        fact("end", row.end ?? "–"),
        row.dropped ? fact("group dropped", row.dropped, "minus") : null,
        row.failure ? fact("failure", row.failure, "minus") : null,
        row.unparsed?.length ? fact("no answer found by", row.unparsed.join(", "), "minus") : null,
      ),
      ledger ? el(".card-note", {}, `in ${ledger.file}; all that it has of the tokens: `, el("code", {}, ledger.command)) : null,
    );
  };

  const fact = (label, value, kind = "") => el(`span.fact${kind ? `.${kind}` : ""}`, {}, el("i", {}, label), value);

  const siblingStrip = (row, siblings, open) =>
    el(
      ".siblings",
      {},
      el("span.hint", {}, "samples of this prompt "),
      siblings.map((other) =>
        el(
          `button.chip${other.i === row.i ? ".here" : ""}`,
          { type: "button", title: `sample ${other.sample}: reward ${number(other.reward)}`, onclick: () => open(other.i) },
          number(other.reward, 3),
        ),
      ),
    );

  const colorBar = (turns, has, scale, again) => {
    if (!turns.some((turn) => turn.tokens)) return null;
    const choose = (event) => {
      chosen = event.target.value;
      again();
    };
    const select = el("select", { onchange: choose, "aria-label": "colour of tokens" }, Object.entries(MODES).map(([value, label]) => el("option", { value, selected: value === mode, disabled: !has[value] }, has[value] ? label : `${label} (not recorded)`)));
    return el(".toolbar.color-bar", {}, el("label", {}, "colour by ", select), scaleLegend(scale));
  };

  const scaleLegend = (scale) => {
    const box = (share, color, text) => el("span.token", { style: `background:${shade(share, color)}` }, text);
    if (mode === "advantage" && scale.advantage <= LEAST_ADVANTAGE) return el("span.scale", {}, box(0, "--minus", "0 of every token"));
    if (mode === "advantage") return el("span.scale", {}, box(-1, "--minus", `−${number(scale.advantage, 3)}`), box(0.001, "--minus", "0"), box(1, "--plus", `+${number(scale.advantage, 3)}`));
    if (mode === "diff") return el("span.scale", {}, box(1, "--minus", `generator surer by ${number(scale.diff, 2)}`), box(1, "--plus", `trainer surer by ${number(scale.diff, 2)} nats`));
    if (mode === "logprob") return el("span.scale", {}, box(1, "--minus", "unlikely"), box(0.001, "--minus", "certain"));
    if (mode === "version") return el("span.scale", {}, scale.versions.map((v, i) => box(0.4, VERSION_COLORS[i % VERSION_COLORS.length], String(v))));
    return null;
  };

  // Before the first turn that a branch has alone: what it is, why it is there, and where it left the others.
  const branchHead = ({ role, cause, trained, after }) => {
    const notes = [cause, after ? `after turn ${number(after)}` : "", trained === false ? "not trained on" : ""].filter(Boolean);
    return el(".branch-head", {}, String(role ?? "branch"), notes.length ? el("span.hint", {}, ` · ${notes.join(" · ")}`) : null);
  };

  const turnView = (turn, { texts, pieces, known, scale, number: turnNumber }) =>
    el(
      ".turn",
      {},
      turn.branch ? branchHead(turn.branch) : null,
      turnNumber ? el(".turn-number", {}, `turn ${turnNumber}`) : null,
      (turn.messages || []).map(([role, text]) => el(`.message.${/^[a-z]+$/.test(role) ? role : "other"}`, {}, el("i", {}, role), el("pre", {}, texts[text] ?? ""))),
      turn.prompt === undefined ? null : el("details.raw", {}, el("summary", {}, `prompt as the model read it, ${relay.number(turn.num_prompt)} tokens`), el("pre", {}, texts[turn.prompt])),
      el(
        ".message.assistant.reply",
        {},
        el("i", {}, "reply", turn.finish ? el("span.hint", {}, ` · ended by ${turn.finish}`) : null, turn.reward ? el("span.hint", {}, ` · the turn's reward ${relay.number(turn.reward)}`) : null),
        turn.tokens && known ? null : el("pre", {}, texts[turn.reply] ?? ""),
        turn.tokens ? tokenText(turn, pieces, scale) : null,
      ),
      turn.ledger ? el(".card-note", {}, `ledger: ${turn.ledger}`) : null,
      turn.metrics ? el(".card-note", {}, Object.entries(turn.metrics).map(([name, value]) => `${name} ${relay.number(value)}  `)) : null,
    );

  // Long replies are made piece by piece as they come into view.
  const tokenText = (turn, pieces, scale) => {
    const box = el("pre.tokens", { "data-tokens": turn.tokens.length });
    const more = (from) => {
      const to = Math.min(from + PER_PIECE, turn.tokens.length);
      for (let i = from; i < to; i += 1) box.append(token(turn, pieces, i, scale));
      if (to === turn.tokens.length) return;
      const rest = el("span.rest", {}, `… ${turn.tokens.length - to} more tokens`);
      box.append(rest);
      relay.whenNear(rest, () => {
        rest.remove();
        more(to);
      });
    };
    more(0);
    const show = (event) => {
      const i = event.target.dataset?.i;
      if (i === undefined) relay.hideTip();
      else tokenTip(event, turn, pieces, Number(i));
    };
    box.addEventListener("pointermove", show);
    box.addEventListener("pointerleave", relay.hideTip);
    return box;
  };

  const token = (turn, pieces, i, scale) => {
    const text = pieces[turn.tokens[i]][1];
    const isMasked = at(turn.mask, i) === 0;
    const shown = text === "" ? "·" : text.replace(/\r/g, "␍").replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));
    const node = el(`span.token${isMasked ? ".masked" : ""}${text === "" ? ".part" : ""}`, { "data-i": i }, shown.replace(/\n/g, "↵\n"));
    node.style.background = background(turn, i, scale);
    return node;
  };

  const tokenTip = (event, turn, pieces, i) => {
    const [id, text] = pieces[turn.tokens[i]];
    const [q, d] = [turn.logprobs?.[i], turn.diffs?.[i]];
    const p = typeof q === "number" && typeof d === "number" ? q + d : null;
    const nats = (value) => (typeof value === "number" ? `${number(value)} (${percent(Math.exp(value))})` : "not recorded");
    const mask = at(turn.mask, i);
    relay.showTip(
      event.clientX,
      event.clientY,
      el(".tip-head", {}, el("code", {}, JSON.stringify(text)), ` token ${id}, number ${i + 1}`),
      relay.tipRow("generator's logprob", nats(q)),
      relay.tipRow("trainer's logprob", nats(p)),
      typeof d === "number" ? relay.tipRow("difference", d === 0 ? "0, identical" : number(d)) : null,
      relay.tipRow("advantage", number(at(turn.advantages, i))),
      relay.tipRow("policy version", number(at(turn.versions, i))),
      relay.tipRow("mask", mask === undefined || mask === null ? "not recorded" : mask === 0 ? "0, not trained on" : `${number(mask)}, trained on`),
    );
  };
})();
