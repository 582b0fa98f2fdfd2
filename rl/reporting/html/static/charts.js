// A curve over steps, drawn by uPlot when it comes near the window.
"use strict";
(() => {
  const FONT = "11px ui-sans-serif, system-ui, sans-serif";
  const charts = new Set();
  let smoothing = 0.6;

  const hidden = new Set();

  // Shows or hides a line of the report on all charts, also on those that are drawn later.
  relay.showLine = (number, shown) => {
    hidden[shown ? "delete" : "add"](number);
    charts.forEach((chart) => chart.showLine?.(number, shown));
  };

  relay.onTheme(() => charts.forEach((chart) => chart.redraw(false)));
  relay.smoothing = () => smoothing;
  relay.setSmoothing = (weight) => {
    smoothing = weight;
    charts.forEach((chart) => chart.refill());
  };

  // Exponential moving average, without the pull of the zero that it begins with.
  relay.smoothed = (values, weight) => {
    let sum = 0;
    let total = 0;
    return values.map((value) => {
      if (value === null || value === undefined) return null;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  };

  const withAlpha = (color, alpha) => {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
    return `rgba(${red},${green},${blue},${alpha})`;
  };

  // Values of each line on the steps of all of them.
  const aligned = (lines) => {
    const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const place = new Map(xs.map((x, i) => [x, i]));
    const spread = (x, values) => {
      const column = new Array(xs.length).fill(null);
      x.forEach((at, i) => {
        column[place.get(at)] = values[i];
      });
      return column;
    };
    const columns = [xs];
    for (const line of lines) {
      const smooths = line.smooth && smoothing > 0;
      columns.push(spread(line.x, smooths ? relay.smoothed(line.y, smoothing) : line.y));
      columns.push(smooths ? spread(line.x, line.y) : new Array(xs.length).fill(null));
      columns.push(spread(line.x, line.high || []), spread(line.x, line.low || []));
    }
    return columns;
  };

  const seriesOf = (line) => {
    const stroke = () => relay.color(line.color);
    const faint = () => withAlpha(relay.color(line.color), 0.28);
    const few = line.x.length <= 60;
    const base = { spanGaps: true, points: { show: false }, show: !hidden.has(line.number) };
    return [
      {
        ...base,
        stroke,
        width: line.width || 1.7,
        dash: line.dash,
        points: { show: Boolean(line.points) || line.x.length === 1, size: few ? 7 : 4, fill: stroke, stroke },
      },
      { ...base, stroke: faint, width: 1 },
      { ...base, stroke: "transparent", width: 0 },
      { ...base, stroke: "transparent", width: 0 },
    ];
  };

  const axes = (log) => [
    {
      stroke: () => relay.color("--muted"),
      font: FONT,
      size: 26,
      gap: 4,
      grid: { show: false },
      ticks: { stroke: () => relay.color("--line"), size: 4, width: 1 },
      values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? relay.compact(tick) : "")),
    },
    {
      stroke: () => relay.color("--muted"),
      font: FONT,
      gap: 6,
      size: (_, ticks) => 16 + 6.2 * Math.max(2, ...(ticks || []).map((tick) => tick.length)),
      grid: { stroke: () => relay.color("--grid"), width: 1 },
      ticks: { show: false },
      space: log ? 24 : 32,
      values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : relay.compact(tick))),
    },
  ];

  const drawMarks = (chart, marks) => {
    const { ctx, bbox } = chart;
    ctx.save();
    for (const mark of marks) {
      const x = chart.valToPos(mark.x, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = relay.color(mark.color);
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (!mark.label) continue;
      ctx.fillStyle = relay.color(mark.color);
      ctx.font = `600 ${11 * devicePixelRatio}px ui-sans-serif, system-ui, sans-serif`;
      const atRight = x + ctx.measureText(mark.label).width + 8 > bbox.left + bbox.width;
      ctx.textAlign = atRight ? "right" : "left";
      ctx.fillText(mark.label, x + (atRight ? -4 : 4) * devicePixelRatio, bbox.top + 11 * devicePixelRatio);
    }
    ctx.restore();
  };

  const range = (lines, log) => (chart, low, high) => {
    if (low === null || high === null) return log ? [0.1, 1] : [0, 1];
    if (log) return uPlot.rangeLog(low, high, 10, false);
    const isShare = lines.every((line) => line.share) && low >= 0 && high <= 1;
    if (isShare) return [0, 1.02];
    if (low === 0 && high === 0) return [0, 1];
    // Ticks between numbers that only rounding tells apart would not end.
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
      const room = Math.abs(low) * 0.1 || 1;
      return [low - room, high + room];
    }
    const room = 0.06 * (high - low);
    return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
  };

  const tipOf = (chart, lines) => {
    const { idx, left } = chart.cursor;
    if (idx === null || idx === undefined || left < 0 || !chart.over.matches(":hover")) return;
    const step = chart.data[0][idx];
    const rows = lines.flatMap((line) => {
      const at = line.x.indexOf(step);
      if (at < 0 || hidden.has(line.number)) return [];
      const low = line.low && line.low[at] !== null && line.low[at] !== line.high[at];
      const fewer = line.num && line.num[at] < line.total ? `, ${line.num[at]} of ${line.total} runs` : "";
      const spread = low ? ` (${relay.number(line.low[at])} … ${relay.number(line.high[at])}${fewer})` : "";
      const value = line.y[at] === null ? "not finite" : relay.number(line.y[at]) + spread;
      return [relay.tipRow(line.label, value, relay.color(line.color))];
    });
    if (!rows.length) return;
    const box = chart.over.getBoundingClientRect();
    relay.showTip(box.left + left, box.top + chart.cursor.top, relay.el(".tip-head", {}, `step ${step}`), rows);
  };

  // lines: {label, x, y, low?, high?, num?, total?, number?, color, dash?, points?, smooth?, share?}; marks: {x, label, color}.
  relay.chart = (host, { lines, marks = [], height = 170 }) => {
    host.style.height = `${height}px`;
    host.classList.add("chart");
    relay.soon(host, () => build(host, lines, marks, height));
    return host;
  };

  const build = (host, lines, marks, height) => {
    const positive = lines.flatMap((line) => line.y).filter((y) => y > 0);
    const hasOthers = lines.some((line) => line.y.some((y) => y !== null && y <= 0));
    const log = !hasOthers && positive.length > 0 && Math.max(...positive) > 1000 * Math.min(...positive);
    const options = {
      width: Math.max(120, host.clientWidth),
      height,
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "steps", setSeries: false }, y: false, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { distr: log ? 3 : 1, range: range(lines, log) } },
      axes: axes(log),
      series: [{}, ...lines.flatMap(seriesOf)],
      bands: lines.flatMap((line, i) =>
        line.high ? [{ series: [4 * i + 3, 4 * i + 4], fill: () => withAlpha(relay.color(line.color), 0.16) }] : [],
      ),
      hooks: {
        draw: [(chart) => drawMarks(chart, marks)],
        setCursor: [(chart) => tipOf(chart, lines)],
      },
    };
    const chart = new uPlot(options, aligned(lines), host);
    chart.over.addEventListener("mouseleave", relay.hideTip);
    chart.refill = () => {
      chart.setData(aligned(lines), false);
      chart.redraw();
    };
    // Four series a line: itself, its values without smoothing, its extremes.
    chart.showLine = (number, shown) =>
      lines.forEach((line, i) => {
        if (line.number === number) for (let of = 1; of <= 4; of += 1) chart.setSeries(4 * i + of, { show: shown });
      });
    charts.add(chart);
    new ResizeObserver(() => {
      const width = host.clientWidth;
      const tall = parseFloat(host.style.height);
      if (width && (width !== chart.width || tall !== chart.height)) chart.setSize({ width, height: tall });
    }).observe(host);
    host.dataset.drawn = String(chart.data[0].length);
  };

  // parts: {label, y, color}, drawn on top of each other, the first one lowest.
  relay.stackedChart = (host, { x, parts, height }) => {
    host.style.height = `${height}px`;
    host.classList.add("chart");
    relay.soon(host, () => buildStack(host, x, parts, height));
  };

  const buildStack = (host, x, parts, height) => {
    let below = x.map(() => 0);
    const tops = parts.map((part) => {
      below = below.map((sum, i) => sum + (part.y[i] || 0));
      return below;
    });
    const series = parts.map((part) => ({
      stroke: () => relay.color(part.color),
      fill: () => relay.color(part.color),
      width: 1,
      points: { show: x.length === 1 },
    }));
    const options = {
      width: Math.max(120, host.clientWidth),
      height,
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "steps", setSeries: false }, y: false, points: { show: false }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (_, low, high) => [0, 1.05 * (high || 1)] } },
      axes: axes(false),
      // The tallest first, so that the lower ones are drawn over it.
      series: [{}, ...series.toReversed()],
      hooks: {
        setCursor: [
          (chart) => {
            const { idx, left } = chart.cursor;
            if (idx === null || idx === undefined || left < 0 || !chart.over.matches(":hover")) return;
            const box = chart.over.getBoundingClientRect();
            const rows = parts.map((part) => relay.tipRow(part.label, relay.duration(part.y[idx]), relay.color(part.color)));
            const head = `step ${x[idx]}: ${relay.duration(tops[tops.length - 1][idx])}`;
            relay.showTip(box.left + left, box.top + chart.cursor.top, relay.el(".tip-head", {}, head), rows.toReversed());
          },
        ],
      },
    };
    const chart = new uPlot(options, [x, ...tops.toReversed()], host);
    chart.over.addEventListener("mouseleave", relay.hideTip);
    chart.refill = () => {};
    charts.add(chart);
    new ResizeObserver(() => {
      if (host.clientWidth && host.clientWidth !== chart.width) chart.setSize({ width: host.clientWidth, height });
    }).observe(host);
    host.dataset.drawn = String(x.length);
  };
})();
