// What the scripts of this page share: elements, numbers and times as text, the packed blocks of data.
// Text from a run only ever becomes a text node: nothing here takes HTML.
"use strict";
const relay = {};

relay.el = (tag, attributes = {}, ...children) => {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name || "div");
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") node.style.cssText = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
};

relay.svg = (tag, attributes = {}, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
};

relay.number = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
};

// For axes: 12k, 3.4M.
relay.compact = (value) => {
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(4))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential().replace("e+", "e");
  return String(Number(value.toPrecision(6)));
};

relay.percent = (share) => {
  if (share === null || share === undefined) return "–";
  const percent = 100 * share;
  return `${percent !== 0 && Math.abs(percent) < 9.95 ? percent.toFixed(1) : Math.round(percent)}%`;
};

relay.duration = (seconds) => {
  if (seconds === null || seconds === undefined) return "–";
  const size = Math.abs(seconds);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (size < 1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  if (size < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
};

const two = (number) => String(number).padStart(2, "0");
relay.clock = (epochS) => {
  const date = new Date(epochS * 1000);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
};
relay.moment = (epochS) => {
  const date = new Date(epochS * 1000);
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${relay.clock(epochS)}`;
};

relay.report = JSON.parse(document.getElementById("report").textContent);
relay.runs = relay.report.runs;
relay.compares = relay.runs.length > 1;
// Of three runs or more each metric has its own chart, and runs that differ only by seed are one line with a band.
relay.many = relay.runs.length > 2;

// Of a line, which is of one run or of several: its colour, and dashes where the colours do not suffice.
const COLORS = 8;
const DASHES = [undefined, [6, 4], [2, 3], [9, 3, 2, 3]];
relay.lineColor = (number) => `--run-${number % COLORS}`;
relay.lineDash = (number) => DASHES[Math.floor(number / COLORS) % DASHES.length];
const lineOf = (runNumber) => relay.report.lines.findIndex((line) => line.runs.includes(runNumber));
relay.runColor = (runNumber) => relay.lineColor(lineOf(runNumber));

// Of a block: a promise of what was packed in it. The latest ones are kept.
const unpacked = new Map();
const KEPT_BLOCKS = 24;
relay.block = (id) => {
  if (!unpacked.has(id)) unpacked.set(id, unpack(document.getElementById(id).textContent));
  const block = unpacked.get(id);
  unpacked.delete(id);
  unpacked.set(id, block);
  if (unpacked.size > KEPT_BLOCKS) unpacked.delete(unpacked.keys().next().value);
  return block;
};

async function unpack(text) {
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i += 1) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Does something once its element comes near the window.
relay.whenNear = (node, act) => {
  const observer = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      observer.disconnect();
      act();
    },
    { rootMargin: "400px" },
  );
  observer.observe(node);
  return observer;
};

// Does something when its element comes near the window, and for a page that is printed or captured without scrolling
// at the latest when the browser has nothing else to do.
relay.soon = (node, act) => {
  let done = false;
  const once = () => {
    // What is in a section that is not shown has no width to draw on: it is drawn once it is shown.
    if (done || !node.clientWidth) return;
    done = true;
    observer.disconnect();
    act();
  };
  const observer = relay.whenNear(node, once);
  addEventListener("beforeprint", once);
  (globalThis.requestIdleCallback ?? setTimeout)(once);
};

// One box beside the pointer for all of the page.
const tip = relay.el(".tip", { role: "tooltip", hidden: true });
relay.showTip = (x, y, ...children) => {
  tip.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  if (!tip.isConnected) document.body.append(tip);
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
  const top = y + 16 + height > innerHeight ? y - 16 - height : y + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
};
relay.hideTip = () => {
  tip.hidden = true;
};
relay.tipRow = (label, value, color) =>
  relay.el(
    ".tip-row",
    {},
    color ? relay.el("span.swatch", { style: `background:${color}` }) : null,
    relay.el("span", {}, label),
    relay.el("b", {}, value),
  );

// A part that fails says so in its place, and the others are shown.
relay.attempt = async (host, act) => {
  try {
    await act();
  } catch (error) {
    host.append(relay.el("p.problems", {}, `This part cannot be shown: ${error.message}`));
    console.error(error);
  }
};

// Tabs of the runs; nothing where there is one. `show(run, number, body)` is called at once for the first;
// `count(run)` is shown on its tab.
relay.perRun = (section, show, { count = () => 0 } = {}) => {
  const body = relay.el(".per-run");
  const choose = (number) => {
    for (const [i, tab] of tabs.entries()) tab.setAttribute("aria-selected", String(i === number));
    body.replaceChildren();
    relay.attempt(body, () => show(relay.runs[number], number, body));
  };
  const tabs = relay.runs.map((run, i) =>
    relay.el("button.tab", { role: "tab", type: "button", onclick: () => choose(i) }, runDot(i), run.name, count(run) ? relay.el("span.count", {}, String(count(run))) : null),
  );
  if (relay.compares) section.append(relay.el(".tabs", { role: "tablist" }, tabs));
  section.append(body);
  // Of many runs the first one that has something to show.
  choose(relay.many ? Math.max(0, relay.runs.findIndex((run) => count(run) > 0)) : 0);
  return choose;
};

const runDot = (number) => relay.el("span.swatch", { style: `background:var(${relay.runColor(number)})` });
relay.runName = (number) => relay.el("span.run-name", {}, runDot(number), relay.runs[number].name);
