// Charts of several runs: one curve for each run and split, drawn with uPlot (https://github.com/leeoniya/uPlot, MIT).
"use strict";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (slot) => css(`--c${slot % 12}`);

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// `validation: forces MAE` for val/forces_mae.
function titleOf(metric) {
  const [split, ...rest] = metric.split("/");
  if (!rest.length) return metric === "lr" ? "learning rate" : metric;
  const name = rest.join("/").replaceAll("_", " ").replace(/\b(mae|rmse|auroc|f1)\b/g, (word) => word.toUpperCase());
  return `${{ val: "validation", train: "training" }[split] || split}: ${name}`;
}

// A chart of one metric. `update` gets the curves: {run, slot, dashed, x, y}.
class Chart {
  constructor(metric, unit, parent, onRemove) {
    this.metric = metric;
    this.card = document.createElement("div");
    this.card.className = "card";
    this.card.dataset.metric = metric;
    const heading = document.createElement("h3");
    const title = document.createElement("span");
    title.textContent = unit ? `${titleOf(metric)}, ${unit}` : titleOf(metric);
    heading.append(title);
    if (onRemove) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "×";
      button.setAttribute("aria-label", `Remove ${metric}`);
      button.onclick = onRemove;
      heading.append(button);
    }
    this.plot = document.createElement("div");
    this.plot.className = "plot";
    this.value = document.createElement("div");
    this.value.className = "value";
    this.card.append(heading, this.plot, this.value);
    parent.append(this.card);
    this.key = null;
    this.resizing = new ResizeObserver(() => {
      if (this.uplot) this.uplot.setSize(this.size());
    });
    this.resizing.observe(this.plot);
  }

  size() {
    return { width: Math.max(this.plot.clientWidth, 120), height: 230 };
  }

  update(curves, options) {
    const positive = options.logarithmic;
    const tables = curves.map((c) => [c.x, c.y.map((v) => (v === null || (positive && v <= 0) ? null : v))]);
    const drawn = curves.some((c, i) => tables[i][1].some((v) => v !== null));
    this.card.classList.toggle("empty", !drawn);
    const data = tables.length ? uPlot.join(tables.map(sorted)) : [[]];
    const marked = curves.map((c, i) => tables[i][1].filter((v) => v !== null).length <= 2);
    const key = JSON.stringify([curves.map((c) => [c.run, c.slot, c.dashed]), marked, options, css("--ink")]);
    if (key === this.key && this.uplot) {
      this.uplot.setData(data);
      return;
    }
    this.key = key;
    if (this.uplot) this.uplot.destroy();
    const axis = { stroke: css("--soft"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const series = curves.map((c, i) => ({
      label: c.dashed ? `${c.run} (training)` : c.run,
      stroke: colour(c.slot),
      width: c.dashed ? 1.2 : 2,
      dash: c.dashed ? [5, 4] : undefined,
      spanGaps: true,
      points: { show: marked[i], size: 6, fill: colour(c.slot) },
    }));
    this.uplot = new uPlot(
      {
        ...this.size(),
        legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false } },
        scales: { x: { time: false }, y: { distr: positive ? 3 : 1 } },
        axes: [
          { ...axis, size: 32, values: (u, ticks) => ticks.map((v) => (v === null ? "" : String(v))), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 1e7] },
          { ...axis, size: 58, values: (u, ticks) => ticks.map((v) => (v === null ? "" : short(v))) },
        ],
        series: [{}, ...series],
        hooks: { setCursor: [(u) => this.describe(u, options.axis)] },
      },
      data,
      this.plot,
    );
  }

  describe(u, axis) {
    const i = u.cursor.idx;
    if (i === null || i === undefined) {
      this.value.textContent = "";
      return;
    }
    const values = u.series.slice(1).map((s, n) => [s.label, u.data[n + 1][i]]).filter(([, v]) => v !== null && v !== undefined);
    this.value.textContent = `${axis} ${short(u.data[0][i])}: ` + values.map(([name, v]) => `${name} ${short(v)}`).join(", ");
  }

  remove() {
    this.resizing.disconnect();
    if (this.uplot) this.uplot.destroy();
    this.card.remove();
  }
}

// Rows of several validations in one epoch have the same x; the last one is drawn.
function sorted([x, y]) {
  const last = new Map();
  x.forEach((v, i) => v !== null && v !== undefined && last.set(v, y[i]));
  const xs = [...last.keys()].sort((a, b) => a - b);
  return [xs, xs.map((v) => last.get(v))];
}

// A small curve for a table cell.
function spark(values) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "spark");
  svg.setAttribute("viewBox", "0 0 100 24");
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  if (values.length > 1) {
    const logs = values.every((v) => v > 0) ? values.map(Math.log) : values;
    const low = Math.min(...logs);
    const span = Math.max(...logs) - low || 1;
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    line.setAttribute("points", logs.map((v, i) => `${(100 * i) / (logs.length - 1)},${22 - (20 * (v - low)) / span}`).join(" "));
    svg.append(line);
  }
  return svg;
}
