// The live page: asks the server for the table of runs every two seconds, and for what the selected runs need.
"use strict";

const EVERY_MS = 2000;
const LARGEST_COMPARISON = 12;
const token = location.pathname.split("/")[1];
const at = (id) => document.getElementById(id);
const state = { runs: [], table: null, sort: { key: "started", descending: true }, selected: [], shown: null, extra: [], slots: new Map(), charts: new Map(), logarithmic: true };
const tags = new Map();
const answers = new Map();

function made(name, text, className) {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

// The answer to a GET request, and whether it is another one than before.
async function ask(path, parameters) {
  const query = new URLSearchParams(parameters).toString();
  const url = query ? `${path}?${query}` : path;
  const headers = tags.has(url) ? { "If-None-Match": tags.get(url) } : {};
  const answer = await fetch(url, { headers, cache: "no-store" });
  if (answer.status === 304) return [answers.get(url), false];
  const content = answer.headers.get("Content-Type") === "application/json" ? await answer.json() : {};
  if (!answer.ok) throw new Error(content.error || `${answer.status} ${answer.statusText}`);
  if (tags.size > 40) {
    tags.clear();
    answers.clear();
  }
  tags.set(url, answer.headers.get("ETag"));
  answers.set(url, content);
  return [content, true];
}

async function send(request, run) {
  const answer = await fetch(`api/${request}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Forgefield-Token": token },
    body: JSON.stringify({ run }),
  });
  const content = await answer.json().catch(() => ({}));
  return content.message || content.error || `${answer.status} ${answer.statusText}`;
}

// ---- the address remembers what is shown

function readAddress() {
  const words = new URLSearchParams(location.hash.slice(1));
  state.selected = words.getAll("run");
  state.shown = words.get("log") || state.selected[0] || null;
  state.extra = words.getAll("metric");
}

function writeAddress() {
  const words = new URLSearchParams();
  state.selected.forEach((run) => words.append("run", run));
  if (state.shown && state.shown !== state.selected[0]) words.set("log", state.shown);
  state.extra.forEach((metric) => words.append("metric", metric));
  history.replaceState(null, "", `#${words}`);
}

// The colour of a run stays the same while it is selected.
function slotOf(run) {
  if (!state.slots.has(run)) {
    const used = new Set(state.slots.values());
    let slot = 0;
    while (used.has(slot)) slot += 1;
    state.slots.set(run, slot);
  }
  return state.slots.get(run);
}

function select(run, wanted) {
  if (wanted && state.selected.length >= LARGEST_COMPARISON) {
    at("hint").textContent = `At most ${LARGEST_COMPARISON} runs can be shown together.`;
    return;
  }
  state.selected = state.selected.filter((name) => name !== run).concat(wanted ? [run] : []);
  if (!wanted) state.slots.delete(run);
  writeAddress();
}

// ---- tables

function heading(column, sort, onSort) {
  const cell = made("th", undefined, column.numeric ? "num" : "");
  cell.scope = "col";
  const content = onSort ? made("button") : cell;
  content.append(made("span", column.title));
  const below = [column.detail, column.unit].filter(Boolean).join(", ");
  if (below) content.append(made("small", below));
  if (onSort) {
    content.type = "button";
    content.onclick = () => onSort(column.key);
    cell.append(content);
    if (sort.key === column.key) cell.setAttribute("aria-sort", sort.descending ? "descending" : "ascending");
  }
  return cell;
}

function ordered(rows, index, descending) {
  const value = (row) => row[index][1];
  const known = rows.filter((row) => value(row) !== null);
  const missing = rows.filter((row) => value(row) === null);
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true }));
  known.sort((a, b) => (descending ? -1 : 1) * compare(value(a), value(b)));
  return [...known, ...missing];
}

function drawRuns() {
  const { columns, rows } = state.table;
  const index = Math.max(0, columns.findIndex((column) => column.key === state.sort.key));
  const wanted = at("filter").value.trim().toLowerCase();
  const shown = ordered(rows, index, state.sort.descending).filter((row) => row[0][0].toLowerCase().includes(wanted));
  const byName = new Map(state.runs.map((run) => [run.name, run]));
  const onSort = (key) => {
    const numeric = columns.find((column) => column.key === key).numeric;
    state.sort = { key, descending: state.sort.key === key ? !state.sort.descending : !numeric && key === "started" };
    drawRuns();
  };
  const line = made("tr");
  columns.forEach((column, i) => {
    line.append(heading(column, state.sort, onSort));
    if (i === 1) line.append(heading({ title: "course" }));
  });
  at("table").tHead.replaceChildren(line);
  const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : undefined;
  at("table").tBodies[0].replaceChildren(...shown.map((row) => runRow(row, columns, byName.get(row[0][1]))));
  if (focused) {
    const again = [...at("table").querySelectorAll("[data-key]")].find((element) => element.dataset.key === focused);
    if (again) again.focus({ preventScroll: true });
  }
  if (!shown.length) {
    const cell = made("td", rows.length ? "No run has such a name." : "There are no runs here yet; forgefield train starts one.");
    cell.colSpan = columns.length + 1;
    const empty = made("tr");
    empty.append(cell);
    at("table").tBodies[0].append(empty);
  }
}

function runRow(row, columns, run) {
  const line = made("tr", undefined, run.name === state.shown ? "shown" : "");
  row.forEach(([text], i) => {
    const cell = made("td", undefined, columns[i].numeric ? "num" : "");
    if (columns[i].key === "run") cell.append(nameCell(run));
    else if (columns[i].key === "state") cell.append(badge(run.state, run.host));
    else cell.textContent = text;
    line.append(cell);
    if (i === 1) {
      const course = made("td");
      course.append(spark(run.course));
      line.append(course);
    }
  });
  return line;
}

function nameCell(run) {
  const cell = made("div", undefined, "name");
  const box = made("input");
  box.type = "checkbox";
  box.checked = state.selected.includes(run.name);
  box.dataset.key = `select ${run.name}`;
  box.setAttribute("aria-label", `Select ${run.name}`);
  box.onchange = () => {
    select(run.name, box.checked);
    refresh();
  };
  const dot = made("span", undefined, "dot");
  if (box.checked) dot.style.background = colour(slotOf(run.name));
  const button = made("button", run.name);
  button.type = "button";
  button.title = run.name;
  button.dataset.key = `show ${run.name}`;
  button.onclick = () => {
    state.shown = run.name;
    if (!state.selected.includes(run.name)) select(run.name, true);
    writeAddress();
    refresh();
  };
  cell.append(box, dot, button);
  if (run.findings) {
    const note = made("span", "!", "badge interrupted");
    note.title = `${run.findings} findings of the diagnosis`;
    cell.append(note);
  }
  return cell;
}

function badge(name, host) {
  return made("span", host ? `${name} on ${host}` : name, `badge ${name.replaceAll(" ", "-")}`);
}

function drawTable(table, { columns, rows }, best) {
  const line = made("tr");
  columns.forEach((column) => line.append(heading(column)));
  table.tHead.replaceChildren(line);
  const lines = rows.map((row) => {
    const numbers = row.filter((cell, i) => columns[i].numeric).map((cell) => cell[1]).filter((value) => typeof value === "number");
    const lowest = best && numbers.length > 1 && !/accuracy|F1|AUROC/.test(row[0][0]) ? Math.min(...numbers) : null;
    const drawn = made("tr");
    row.forEach(([text, value], i) => {
      const marked = columns[i].numeric && lowest !== null && value === lowest ? " best" : "";
      drawn.append(made("td", text, (columns[i].numeric ? "num" : "") + marked));
    });
    return drawn;
  });
  if (!lines.length) {
    const cell = made("td", "none");
    cell.colSpan = columns.length;
    const empty = made("tr");
    empty.append(cell);
    lines.push(empty);
  }
  table.tBodies[0].replaceChildren(...lines);
}

// ---- curves

function metricsToDraw(available) {
  const keys = available.map((metric) => metric.key);
  const kind = at("errors").value;
  const first = keys.filter((key) => key === "val/loss" || (!keys.includes("val/loss") && key === "train/loss"));
  const errors = keys.filter((key) => key.startsWith("val/") && (key.endsWith(`_${kind}`) || key.endsWith("_accuracy")) && !key.includes("energy_total"));
  return [...new Set([...first, ...errors.slice(0, 5), ...state.extra])];
}

async function drawCurves() {
  at("curves").hidden = !state.selected.length;
  if (!state.selected.length) return;
  const runs = state.selected.map((run) => ["run", run]);
  const [known] = await ask("api/curves", runs);
  const metrics = metricsToDraw(known.metrics);
  const keys = known.metrics.map((metric) => metric.key);
  const training = (key) => key.replace(/^val\//, "train/");
  const pairs = at("training").checked ? metrics.map(training).filter((key) => keys.includes(key)) : [];
  const [content] = await ask("api/curves", [...runs, ...[...new Set([...metrics, ...pairs])].map((key) => ["metric", key])]);
  const options = { logarithmic: at("logarithmic").checked, axis: at("axis").value };
  for (const [metric, chart] of state.charts) {
    if (!metrics.includes(metric)) {
      chart.remove();
      state.charts.delete(metric);
    }
  }
  for (const metric of metrics) {
    const unit = (known.metrics.find((m) => m.key === metric) || {}).unit;
    if (!state.charts.has(metric)) {
      const remove = state.extra.includes(metric) ? () => removeMetric(metric) : null;
      state.charts.set(metric, new Chart(metric, unit, at("charts"), remove));
    }
    const curves = [];
    for (const run of state.selected.filter((name) => content.runs[name])) {
      const { series, epoch, step } = content.runs[run];
      const x = options.axis === "step" ? step : epoch;
      if (at("training").checked && training(metric) !== metric && series[training(metric)]) {
        curves.push({ run, slot: slotOf(run), dashed: true, x, y: series[training(metric)] });
      }
      if (series[metric]) curves.push({ run, slot: slotOf(run), dashed: false, x, y: series[metric] });
    }
    state.charts.get(metric).update(curves, options);
  }
  drawLegend(metrics.length > 0);
  drawChoices(known.metrics, metrics);
}

function drawLegend(hasMetrics) {
  at("legend").replaceChildren(
    ...state.selected.map((run) => {
      const entry = made("span");
      const dot = made("span", undefined, "dot");
      dot.style.background = colour(slotOf(run));
      entry.append(dot, made("span", run));
      return entry;
    }),
  );
  if (!hasMetrics) at("legend").append(made("span", "Curves appear after the first validation."));
  else if (at("training").checked) at("legend").append(made("span", "dashed: training"));
}

function drawChoices(available, drawn) {
  const others = available.filter((metric) => !drawn.includes(metric.key));
  const key = others.map((metric) => metric.key).join();
  if (at("more").dataset.key === key) return;
  at("more").dataset.key = key;
  const option = (value, text) => {
    const choice = made("option", text);
    choice.value = value;
    return choice;
  };
  at("more").replaceChildren(option("", "add a metric"), ...others.map((metric) => option(metric.key, titleOf(metric.key))));
}

function removeMetric(metric) {
  state.extra = state.extra.filter((name) => name !== metric);
  writeAddress();
  refresh();
}

// ---- comparison and one run

async function drawComparison() {
  at("comparison").hidden = state.selected.length < 2;
  if (state.selected.length < 2) return;
  const [content, isNew] = await ask("api/compare", state.selected.map((run) => ["run", run]));
  const key = state.selected.join("\n");
  if (!isNew && at("comparison").dataset.key === key) return;
  at("comparison").dataset.key = key;
  drawTable(at("compared-errors"), content.errors, true);
  drawTable(at("compared-settings"), content.settings, false);
}

async function drawDetail() {
  at("detail").hidden = !state.shown;
  if (!state.shown) return;
  const [content, isNew] = await ask("api/run", [["run", state.shown]]);
  const run = state.runs.find((one) => one.name === state.shown) || { requests: [] };
  at("stop").disabled = !run.requests.includes("stop");
  at("checkpoint").disabled = !run.requests.includes("checkpoint");
  if (!isNew && at("detail").dataset.run === state.shown) return;
  if (at("detail").dataset.run !== state.shown) at("message").textContent = "";
  const log = at("log");
  const follow = at("detail").dataset.run !== state.shown || log.scrollTop + log.clientHeight > log.scrollHeight - 30;
  at("detail").dataset.run = state.shown;
  at("run-name").textContent = content.name;
  at("run-state").textContent = content.state;
  at("run-state").className = `badge ${content.state.replaceAll(" ", "-")}`;
  at("report").hidden = !content.has_report;
  at("report").href = `report?${new URLSearchParams({ run: content.name })}`;
  log.textContent = content.log.join("\n");
  if (follow) log.scrollTop = log.scrollHeight;
  at("facts").replaceChildren(
    ...content.facts.map(([name, value]) => {
      const row = made("div");
      row.append(made("dt", name), made("dd", value));
      return row;
    }),
  );
  const none = content.has_diagnosis ? "No problems were found." : "This run has no diagnosis callbacks; add them with callbacks: [gradient_check, loss_spike] in the config.";
  const findings = content.findings.map((finding) => {
    const item = made("li");
    item.append(made("strong", `${finding.callback}, step ${finding.step}. `), `${finding.what} `, made("em", finding.advice));
    return item;
  });
  at("findings").replaceChildren(...(findings.length ? findings : [made("li", none)]));
}

// ---- requests

async function request(kind) {
  const run = state.shown;
  if (kind === "stop") {
    at("question").textContent = `Stop ${run}? It finishes the current step and saves a checkpoint; the command that started it resumes it.`;
    at("confirm").showModal();
    const answer = await new Promise((done) => at("confirm").addEventListener("close", () => done(at("confirm").returnValue), { once: true }));
    if (answer !== "yes") return;
  }
  at("message").textContent = await send(kind, run);
  refresh();
}

// ---- refreshing

let busy = false;
let again = false;

async function refresh() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    const [content, isNew] = await ask("api/runs", [["errors", at("errors").value]]);
    at("folder").textContent = content.folder;
    state.runs = content.runs;
    state.table = content.table;
    const names = new Set(content.runs.map((run) => run.name));
    state.selected = state.selected.filter((run) => names.has(run));
    if (state.shown && !names.has(state.shown)) state.shown = null;
    if (!state.selected.length && !state.started && content.runs.length) choose(content);
    state.started = true;
    drawRuns();
    await drawCurves();
    await drawComparison();
    await drawDetail();
    const running = content.runs.filter((run) => run.state === "running").length;
    const n = content.runs.length;
    document.title = running ? `(${running}) Forgefield runs` : "Forgefield runs";
    at("status").textContent = `${n} run${n === 1 ? "" : "s"}, ${running} running; updated ${new Date().toLocaleTimeString()}`;
    at("status").className = "";
  } catch (error) {
    at("status").textContent = error instanceof TypeError ? "The server does not answer; is forgefield watch still running?" : error.message;
    at("status").className = "lost";
  } finally {
    busy = false;
  }
  if (again) {
    again = false;
    await refresh();
  }
}

// At first the run that is trained now is shown, or else the newest.
function choose(content) {
  const index = content.table.columns.findIndex((column) => column.key === "started");
  const newest = index < 0 ? content.table.rows : ordered(content.table.rows, index, true);
  const running = content.runs.filter((run) => run.state === "running").map((run) => run.name);
  const first = newest.map((row) => row[0][1]).find((name) => !running.length || running.includes(name));
  state.selected = [first];
  state.shown = first;
}

at("theme").onclick = () => {
  const root = document.documentElement;
  const now = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
  refresh();
};
at("filter").oninput = () => state.table && drawRuns();
for (const id of ["errors", "training", "logarithmic", "axis"]) at(id).onchange = () => refresh();
at("more").onchange = () => {
  if (at("more").value) state.extra.push(at("more").value);
  at("more").value = "";
  writeAddress();
  refresh();
};
at("stop").onclick = () => request("stop");
at("checkpoint").onclick = () => request("checkpoint");
window.addEventListener("hashchange", () => {
  readAddress();
  refresh();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => refresh());
document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && refresh());
setInterval(() => document.visibilityState === "visible" && refresh(), EVERY_MS);
readAddress();
refresh();
