// What each process did when: a canvas with a lane a process, to be zoomed into.
"use strict";
(() => {
  const { el, number, duration } = relay;
  const GUTTER = 128;
  const RULER = 34;
  const ROW = 16;
  const LANE_GAP = 10;
  const LABELS = {
    generate: "generate", reward: "reward", pack: "pack", forward_backward: "forward, backward", optim: "optimizer",
    push: "push weights", pull: "pull weights", wait: "wait", evaluate: "evaluate", checkpoint: "checkpoint",
    setup: "set-up", other: "other",
  };
  const EVENTS = { lost: "--bad", recovered: "--good", went_back: "--c-orange", checkpoint_damaged: "--bad", stopped: "--bad" };

  relay.timeline = (host) =>
    relay.perRun(host, async (run, i, body) => {
      const data = await relay.block(run.blocks.timeline);
      if (!data.lanes.length) {
        body.append(el("p.empty", {}, "This run has no record of what its processes did (logs/spans)."));
        return;
      }
      new Timeline(data, body);
    });

  class Timeline {
    constructor(data, host) {
      this.data = data;
      this.from = 0;
      this.to = data.length_s;
      this.tops = [];
      let top = RULER;
      for (const lane of data.lanes) {
        this.tops.push(top);
        top += lane.num_rows * ROW + LANE_GAP;
      }
      this.height = top;
      this.canvas = el("canvas", { tabindex: 0, "aria-label": "timeline of the processes" });
      this.canvas.style.height = `${top}px`;
      host.append(this.toolbar(), el(".timeline", {}, this.canvas), this.legend());
      this.listen();
      relay.onTheme(() => this.draw());
      new ResizeObserver(() => this.draw()).observe(this.canvas);
      const { steps } = data;
      if (steps.length > 8) this.zoomTo(steps[Math.max(0, steps.length - 4)][1], steps[steps.length - 1][1] + steps[steps.length - 1][2]);
    }

    toolbar() {
      const { data } = this;
      const last = data.steps[data.steps.length - 1];
      const button = (text, act) => el("button", { type: "button", onclick: act }, text);
      const toStep = (event) => {
        const found = data.steps.find(([step]) => step === Number(event.target.value));
        if (found) this.zoomTo(found[1], found[1] + found[2]);
      };
      return el(
        ".toolbar",
        {},
        button("whole run", () => this.zoomTo(0, data.length_s)),
        last ? button("last step", () => this.zoomTo(last[1], last[1] + last[2])) : null,
        last
          ? el("label", {}, "step ", el("input.short", { type: "number", min: data.steps[0][0], max: last[0], value: last[0], onchange: toStep }))
          : null,
        button("−", () => this.zoom(2, (this.from + this.to) / 2)),
        button("+", () => this.zoom(0.5, (this.from + this.to) / 2)),
        el("span.hint", {}, "drag to zoom in, double-click for the whole run, arrow keys to move"),
        data.gap_s
          ? el("span.hint", {}, `activities closer than ${duration(data.gap_s)} are one block; all of them: timeline.json in Perfetto`)
          : null,
      );
    }

    legend() {
      const used = new Set(this.data.names.map(([, kind]) => kind));
      const kinds = Object.keys(LABELS).filter((kind) => used.has(kind));
      return el(".legend", {}, kinds.map((kind) => el("span", {}, el("span.swatch", { style: `background:var(--t-${kind})` }), LABELS[kind])));
    }

    zoomTo(from, to) {
      const room = to > from ? 0.01 * (to - from) : 0.5;
      this.set(from - room, to + room);
    }

    zoom(factor, around) {
      this.set(around - (around - this.from) * factor, around + (this.to - around) * factor);
    }

    set(from, to) {
      const least = Math.max(1e-4, this.data.length_s * 1e-7);
      const length = Math.min(Math.max(to - from, least), 1.02 * this.data.length_s);
      this.from = Math.max(-0.01 * this.data.length_s, Math.min(from, 1.01 * this.data.length_s - length));
      this.to = this.from + length;
      this.draw();
    }

    get scale() {
      return (this.canvas.clientWidth - GUTTER - 8) / (this.to - this.from);
    }

    x(at) {
      return GUTTER + (at - this.from) * this.scale;
    }

    at(x) {
      return this.from + (x - GUTTER) / this.scale;
    }

    listen() {
      const { canvas } = this;
      let dragged = null;
      canvas.addEventListener("pointerdown", (event) => {
        dragged = { start: event.offsetX, end: event.offsetX };
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        if (dragged) {
          dragged.end = event.offsetX;
          this.draw(dragged);
        } else this.tip(event);
      });
      canvas.addEventListener("pointerup", () => {
        const { start, end } = dragged || { start: 0, end: 0 };
        dragged = null;
        if (Math.abs(end - start) > 5) this.set(this.at(Math.min(start, end)), this.at(Math.max(start, end)));
        else this.draw();
      });
      canvas.addEventListener("pointerleave", relay.hideTip);
      canvas.addEventListener("dblclick", () => this.zoomTo(0, this.data.length_s));
      canvas.addEventListener("wheel", (event) => {
        const length = this.to - this.from;
        if (event.ctrlKey || event.metaKey) this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event.offsetX));
        else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.set(this.from + (event.deltaX / 600) * length, this.to + (event.deltaX / 600) * length);
        else return;
        event.preventDefault();
      }, { passive: false });
      canvas.addEventListener("keydown", (event) => {
        const length = this.to - this.from;
        const moves = { ArrowLeft: -0.2, ArrowRight: 0.2 };
        const zooms = { "+": 0.5, "-": 2 };
        if (moves[event.key]) this.set(this.from + moves[event.key] * length, this.to + moves[event.key] * length);
        else if (zooms[event.key]) this.zoom(zooms[event.key], (this.from + this.to) / 2);
        else return;
        event.preventDefault();
      });
    }

    draw(selected = null) {
      const { canvas, data } = this;
      const width = canvas.clientWidth;
      if (!width) return;
      const ratio = devicePixelRatio;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(this.height * ratio);
      const ctx = canvas.getContext("2d");
      ctx.scale(ratio, ratio);
      ctx.font = "11px ui-sans-serif, system-ui, sans-serif";
      ctx.textBaseline = "middle";
      this.drawRuler(ctx, width);
      let drawn = 0;
      ctx.save();
      ctx.beginPath();
      ctx.rect(GUTTER, 0, width - GUTTER, this.height);
      ctx.clip();
      data.lanes.forEach((lane, i) => {
        drawn += this.drawLane(ctx, lane, this.tops[i], width);
      });
      this.drawEvents(ctx);
      if (selected) {
        ctx.fillStyle = relay.color("--select");
        ctx.fillRect(Math.min(selected.start, selected.end), 0, Math.abs(selected.end - selected.start), this.height);
      }
      ctx.restore();
      this.drawNames(ctx, width);
      canvas.dataset.drawn = String(drawn);
    }

    drawRuler(ctx, width) {
      const ticks = Math.max(2, Math.floor((width - GUTTER) / 110));
      const raw = (this.to - this.from) / ticks;
      const size = 10 ** Math.floor(Math.log10(raw));
      const every = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= raw);
      ctx.textAlign = "center";
      for (let at = Math.ceil(Math.max(0, this.from) / every) * every; at <= this.to; at += every) {
        const x = Math.round(this.x(at)) + 0.5;
        ctx.strokeStyle = relay.color("--grid");
        ctx.beginPath();
        ctx.moveTo(x, RULER - 6);
        ctx.lineTo(x, this.height);
        ctx.stroke();
        ctx.fillStyle = relay.color("--muted");
        if (x > GUTTER + 16 && x < width - 24) ctx.fillText(duration(Math.abs(at) < 1e-9 ? 0 : at), x, 8);
      }
      let free = GUTTER;
      for (const [step, at] of this.data.steps) {
        const x = Math.round(this.x(at)) + 0.5;
        if (x < GUTTER || x > width) continue;
        ctx.strokeStyle = relay.color("--line");
        ctx.beginPath();
        ctx.moveTo(x, 16);
        ctx.lineTo(x, this.height);
        ctx.stroke();
        if (x < free || x > width - 50) continue;
        ctx.textAlign = "left";
        ctx.fillStyle = relay.color("--text");
        ctx.fillText(`step ${step}`, x + 3, 22);
        free = x + 12 + ctx.measureText(`step ${step}`).width;
      }
    }

    drawLane(ctx, lane, top, width) {
      const ends = new Array(lane.num_rows).fill(-1);
      let drawn = 0;
      for (let i = 0; i < lane.at.length; i += 1) {
        if (lane.at[i] > this.to || lane.at[i] + lane.for[i] < this.from) continue;
        const left = Math.max(GUTTER, this.x(lane.at[i]));
        const right = Math.min(width, this.x(lane.at[i] + lane.for[i]));
        const row = lane.row[i];
        drawn += 1;
        if (right < ends[row] + 0.5 && !lane.error[i]) continue;
        const size = Math.max(1, right - left - (right - left > 3 ? 1 : 0));
        const [name, kind] = this.data.names[lane.name[i]];
        ctx.fillStyle = relay.color(lane.error[i] ? "--bad" : `--t-${kind}`);
        ctx.fillRect(left, top + row * ROW, size, ROW - 2);
        ends[row] = left + size;
        if (size < 30) continue;
        const text = lane.num[i] > 1 ? `${name} × ${lane.num[i]}` : name;
        const fits = Math.floor((size - 6) / 6);
        if (fits < 4) continue;
        ctx.textAlign = "left";
        ctx.fillStyle = relay.color(kind === "wait" ? "--muted" : "--on-block");
        ctx.fillText(text.length > fits ? `${text.slice(0, fits - 1)}…` : text, left + 4, top + row * ROW + 7.5);
      }
      return drawn;
    }

    drawEvents(ctx) {
      for (const event of this.data.events) {
        const color = EVENTS[event.event];
        if (!color || event.at < this.from || event.at > this.to) continue;
        const x = Math.round(this.x(event.at)) + 0.5;
        ctx.strokeStyle = ctx.fillStyle = relay.color(color);
        ctx.beginPath();
        ctx.moveTo(x, RULER - 4);
        ctx.lineTo(x, this.height);
        ctx.stroke();
        ctx.beginPath();
        ctx.moveTo(x - 4, RULER - 9);
        ctx.lineTo(x + 4, RULER - 9);
        ctx.lineTo(x, RULER - 2);
        ctx.fill();
      }
    }

    drawNames(ctx, width) {
      ctx.textAlign = "left";
      this.data.lanes.forEach((lane, i) => {
        ctx.fillStyle = relay.color("--text");
        ctx.fillText(`${lane.role} ${lane.rank}`, 2, this.tops[i] + 7.5);
        ctx.strokeStyle = relay.color("--grid");
        ctx.beginPath();
        const y = Math.round(this.tops[i] - LANE_GAP / 2) + 0.5;
        ctx.moveTo(0, y);
        ctx.lineTo(width, y);
        ctx.stroke();
      });
    }

    tip(event) {
      const { offsetX: x, offsetY: y } = event;
      const near = this.data.events.find((e) => EVENTS[e.event] && Math.abs(this.x(e.at) - x) < 5 && y < RULER + 4);
      if (near) {
        const { at, event: what, ...fields } = near;
        relay.showTip(event.clientX, event.clientY, el(".tip-head", {}, `${what} at ${duration(at)}`), Object.entries(fields).map(([name, value]) => relay.tipRow(name, String(value))));
        return;
      }
      const found = this.find(x, y);
      if (!found) {
        relay.hideTip();
        return;
      }
      const { lane, i } = found;
      const [name, kind] = this.data.names[lane.name[i]];
      relay.showTip(
        event.clientX,
        event.clientY,
        el(".tip-head", {}, el("span.swatch", { style: `background:var(--t-${kind})` }), name),
        relay.tipRow("took", duration(lane.for[i])),
        relay.tipRow("from", `${duration(lane.at[i])} (${relay.clock(this.data.start_s + lane.at[i])})`),
        lane.version[i] === null ? null : relay.tipRow("version", number(lane.version[i])),
        lane.num[i] > 1 ? relay.tipRow("activities", `${number(lane.num[i])}, ${duration(lane.busy[i])} together`) : null,
        lane.error[i] ? el(".tip-text.bad", {}, lane.error[i]) : null,
      );
    }

    find(x, y) {
      const laneNumber = this.tops.findLastIndex((top) => y >= top);
      if (laneNumber < 0 || x < GUTTER) return null;
      const lane = this.data.lanes[laneNumber];
      const row = Math.floor((y - this.tops[laneNumber]) / ROW);
      const [from, to] = [this.at(x - 1), this.at(x + 1)];
      const i = lane.at.findLastIndex((at, n) => lane.row[n] === row && at <= to && at + lane.for[n] >= from);
      return i < 0 ? null : { lane, i };
    }
  }
})();
