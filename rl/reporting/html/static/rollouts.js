// The browser of rollouts: filters, a list that draws only what is in sight, and the chosen one.
"use strict";
(() => {
  const { el, number } = relay;
  const ROW = 52;
  const browsers = [];
  const ORDERS = {
    recorded: ["as recorded", () => 0],
    latest: ["latest first", (a, b) => b.step - a.step || a.i - b.i],
    best: ["highest reward first", (a, b) => value(b.reward) - value(a.reward)],
    worst: ["lowest reward first", (a, b) => value(a.reward) - value(b.reward)],
    longest: ["longest first", (a, b) => b.tokens - a.tokens],
    different: ["largest trainer − generator first", (a, b) => (b.diff ?? -1) - (a.diff ?? -1)],
  };
  const OUTCOMES = {
    all: ["every outcome", () => true],
    right: ["correct", (row) => row.correct === true],
    wrong: ["wrong", (row) => row.correct === false && !row.failure],
    failed: ["failed, or no answer found", (row) => Boolean(row.failure || row.unparsed?.length)],
    cut: ["not finished", (row) => row.end !== "done"],
  };
  const value = (reward) => (typeof reward === "number" ? reward : Number.NEGATIVE_INFINITY);

  let begun = null;
  const choice = new Promise((resolve) => {
    begun = resolve;
  });

  relay.rollouts = (host) => {
    const choose = relay.perRun(host, (run, i, body) => {
      browsers[i] = new Browser(run, body);
      return browsers[i].ready;
    });
    begun(choose);
  };

  // From a finding: the rollout {step, problem, sample} of a run.
  relay.openRollout = async (runNumber, wanted) => {
    document.getElementById("rollouts").scrollIntoView();
    const choose = await choice;
    if (!browsers[runNumber]?.body.isConnected) choose(runNumber);
    await browsers[runNumber].openLike(wanted);
  };

  class Browser {
    constructor(run, body) {
      this.run = run;
      this.body = body;
      this.ready = relay.block(run.blocks.rollouts).then((index) => this.build(index));
    }

    build(index) {
      this.index = index;
      const { columns } = index;
      const names = Object.keys(columns);
      this.rows = columns.step.map((_, i) => Object.fromEntries([["i", i], ...names.map((name) => [name, columns[name][i]])]));
      if (!this.rows.length) {
        this.body.append(el("p.empty", {}, "No rollouts are recorded (recorder.enable, recorder.num_groups)."));
        return;
      }
      this.count = el("span.hint", { "data-count": "" });
      this.rowsHost = el(".rows");
      this.list = el(".list", { tabindex: 0, role: "listbox", "aria-label": "rollouts" }, this.rowsHost);
      this.detail = el(".detail");
      this.body.append(this.filters(), el(".browser", {}, this.list, this.detail));
      this.list.addEventListener("scroll", () => this.drawRows());
      this.list.addEventListener("keydown", (event) => this.key(event));
      new ResizeObserver(() => this.drawRows()).observe(this.list);
      this.apply();
      this.open((this.shown.find((row) => row.kind === "train") ?? this.shown[0])?.i);
    }

    filters() {
      const { rows } = this;
      const kinds = [...new Set(rows.map((row) => row.kind))];
      const steps = rows.map((row) => row.step);
      const [first, last] = [steps.reduce((a, b) => Math.min(a, b)), steps.reduce((a, b) => Math.max(a, b))];
      const changed = () => this.apply();
      const select = (options) => el("select", { onchange: changed }, options.map(([name, label]) => el("option", { value: name }, label)));
      this.kind = select([["", "every kind"], ...kinds.map((kind) => [kind, kind])]);
      this.outcome = select(Object.entries(OUTCOMES).map(([name, [label]]) => [name, label]));
      this.order = select(Object.entries(ORDERS).map(([name, [label]]) => [name, label]));
      this.from = el("input.short", { type: "number", min: first, max: last, value: first, onchange: changed, "aria-label": "from step" });
      this.to = el("input.short", { type: "number", min: first, max: last, value: last, onchange: changed, "aria-label": "to step" });
      this.text = el("input", { type: "search", placeholder: "problem, or beginning of the reply", oninput: changed, "aria-label": "text" });
      const { num_recorded: recorded } = this.index;
      const left = recorded > rows.length ? `; ${number(rows.length)} of ${number(recorded)} recorded ones are in this page, whole groups at even distances` : "";
      return el(
        ".toolbar",
        {},
        el("label", {}, "steps ", this.from, " to ", this.to),
        this.kind,
        this.outcome,
        this.order,
        this.text,
        el("button", { type: "button", onclick: () => this.searchReplies() }, "search whole replies"),
        this.count,
        left ? el("span.hint", {}, left.slice(2)) : null,
      );
    }

    apply(found = null) {
      const [from, to] = [Number(this.from.value), Number(this.to.value)];
      const [kind, text] = [this.kind.value, this.text.value.toLowerCase()];
      const outcome = OUTCOMES[this.outcome.value][1];
      const says = (row) => !text || `${row.problem} ${row.excerpt}`.toLowerCase().includes(text);
      this.shown = this.rows
        .filter((row) => row.step >= from && row.step <= to && (!kind || row.kind === kind) && outcome(row) && (found ? found.has(row.i) : says(row)))
        .sort(ORDERS[this.order.value][1]);
      this.count.textContent = `${number(this.shown.length)} of ${number(this.rows.length)} rollouts`;
      this.count.dataset.count = String(this.shown.length);
      this.rowsHost.style.height = `${this.shown.length * ROW}px`;
      this.list.scrollTop = 0;
      this.drawRows();
    }

    // Through the chunks one after another; the list is what has the text.
    async searchReplies() {
      const text = this.text.value.toLowerCase();
      if (!text) return this.apply();
      const found = new Set();
      for (let chunk = 0; chunk < this.run.blocks.chunks; chunk += 1) {
        this.count.textContent = `searching, ${Math.round((100 * chunk) / this.run.blocks.chunks)}%`;
        const { rollouts, texts } = await relay.block(`${this.run.blocks.chunk}${chunk}`);
        rollouts.forEach((turns, i) => {
          if (turns.some((turn) => (texts[turn.reply] ?? "").toLowerCase().includes(text))) found.add(this.index.first_of_chunk[chunk] + i);
        });
      }
      return this.apply(found);
    }

    drawRows() {
      const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 4);
      const last = Math.min(this.shown.length, first + Math.ceil(this.list.clientHeight / ROW) + 9);
      this.rowsHost.replaceChildren(...this.shown.slice(first, last).map((row, n) => this.rowNode(row, first + n)));
    }

    rowNode(row, place) {
      const kind = row.failure || row.correct === false ? "minus" : row.correct ? "plus" : "";
      return el(
        `.row${row.i === this.opened ? ".here" : ""}`,
        { style: `top:${place * ROW}px`, role: "option", "aria-selected": String(row.i === this.opened), onclick: () => this.open(row.i) },
        el("span.row-top", {}, el("b", {}, `step ${number(row.step)}`), el("span.row-problem", {}, row.problem ?? ""), row.kind === "train" ? null : el("span.row-kind", {}, row.kind), el(`span.row-reward.${kind}`, {}, number(row.reward, 3))),
        el("span.row-text", {}, row.failure ? `failed: ${row.failure}` : row.excerpt || "(empty)"),
      );
    }

    key(event) {
      const moves = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      const here = this.shown.findIndex((row) => row.i === this.opened);
      const next = this.shown[Math.max(0, Math.min(this.shown.length - 1, here + moves[event.key]))];
      if (next) this.open(next.i);
    }

    async openLike({ step, problem, sample, kind }) {
      await this.ready;
      const fits = (row) => row.step === step && (problem === undefined || row.problem === problem);
      const rows = this.rows.filter(fits);
      const row = rows.find((r) => r.sample === sample && (!kind || r.kind === kind)) ?? rows.find((r) => r.sample === sample) ?? rows[0];
      if (!row) return;
      if (!this.shown.includes(row)) {
        [this.from.value, this.to.value] = [this.from.min, this.to.max];
        this.kind.value = "";
        this.outcome.value = "all";
        this.text.value = "";
        this.apply();
      }
      await this.open(row.i);
    }

    async open(i) {
      if (i === undefined) return;
      this.opened = i;
      const place = this.shown.findIndex((row) => row.i === i);
      const { scrollTop, clientHeight } = this.list;
      if (place * ROW < scrollTop || (place + 1) * ROW > scrollTop + clientHeight) this.list.scrollTop = Math.max(0, place * ROW - clientHeight / 3);
      this.drawRows();
      const chunk = this.index.first_of_chunk.findLastIndex((first) => first <= i);
      const { rollouts, texts, pieces } = await relay.block(`${this.run.blocks.chunk}${chunk}`);
      if (this.opened !== i) return; // Another was chosen meanwhile.
      const row = this.rows[i];
      const turns = rollouts[i - this.index.first_of_chunk[chunk]];
      const siblings = this.rows.filter((other) => ["step", "kind", "set", "problem"].every((name) => other[name] === row[name]));
      const view = relay.rolloutView({ row, turns, texts, pieces, known: this.index.texts_known }, { siblings, open: (other) => this.open(other), again: () => this.open(i) });
      this.detail.replaceChildren(view);
      this.detail.scrollTop = 0;
    }
  }
})();
