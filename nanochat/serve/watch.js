// ---- The view of the training runs: the server's answer to `runs`, updated every two seconds.
// Elements are made once for each run and changed in place, so focus, cursors and opened tables stay.

const STAGES = { base: "Pretraining", mid: "Mid-training", sft: "Fine-tuning", rl: "Rewards" };
const CHARTS = [  // charts for which a stage has no numbers are hidden
  { name: "val/bpb", title: "Held-out text", later: "Held-out answers", unit: "bits per byte", scale: "log", floor: true,
    help: "Bits that the model needs for a byte: lower is better. After pretraining only answers count, not text. Floor: the text's entropy, the lowest possible value" },
  { name: "train/loss", title: "Training loss", unit: "nats per token", scale: "log",
    help: "−ln of the probability that the model gave to each next token, on average: lower is better. A nat is 1.44 bits" },
  { name: "eval/pass@1", title: "Problems solved", unit: "held out", scale: "percent" },
  { name: "rl/reward", title: "Reward", unit: "mean per step", scale: "percent" },
  { name: "train/tok_per_sec", title: "Throughput", unit: "tokens per second", scale: "zero" },
  { name: "train/lrm", title: "Learning rate", unit: "relative to the first", scale: "zero" },
];
const WATCHES = document.documentElement.dataset.watches === "yes";
const POLL = 2000, POLL_HIDDEN = 10000;  // ms; hidden: only to learn of a new model
const runViews = new Map();              // tag -> the elements that show it
let runsShown = recall("localStorage", "runs") ?? [];  // tags; none: the newest run
let lastRuns = null, pollTimer = 0;

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function span(seconds) {
  return seconds < 90 ? `${Math.round(seconds)} s` : seconds < 5400 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
/** Three digits, or a whole number from 1,000 on: 0.0339, 1.18, 34,098. */
function figure(value, scale = "") {
  if (scale === "percent") return `${(100 * value).toFixed(1)}%`;
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
}
const steps = (count) => Math.round(count).toLocaleString("en");

// ---- Which view

function showView() {
  const training = WATCHES && (location.hash === "#training" || (location.hash !== "#chat" && !models.length));
  document.body.classList.toggle("watching", training);
  for (const link of $("views").children) link.ariaCurrent = (link.hash === "#training") === training ? "page" : null;
  $("training").hidden = !training;
  for (const id of ["chatView", "dock"]) $(id).hidden = training;
  for (const id of ["newChat", "openSettings", "modelName"]) $(id).hidden = training;
  document.title = training ? "nanochat: training" : "nanochat";
  if (training && lastRuns) showRuns(lastRuns);
}

async function poll() {
  clearTimeout(pollTimer);
  if (!document.hidden) {
    try {
      const response = await fetch("runs", { headers: headers() });
      if (response.status === 401) askForKey();
      if (response.ok) {
        lastRuns = await response.json();
        $("lost").hidden = true;
        if (lastRuns.models.join() !== models.map(({ id }) => id).join()) await meet();
        if (!$("training").hidden) showRuns(lastRuns);
      }
    } catch {
      $("lost").hidden = false;
    }
  }
  pollTimer = setTimeout(poll, $("training").hidden ? POLL_HIDDEN : POLL);
}

/** The served models have changed. The view stays the same; a line says that a model can chat. */
async function meet() {
  const none = !models.length;
  await loadModels();
  const name = models.at(-1)?.id;
  if (name && !$("training").hidden) {
    $("canChat").replaceChildren(`${name} can chat now. `, el("a", { href: "#chat" }, "Talk to it"));
    $("canChat").hidden = false;
  }
  if (none && !location.hash) history.replaceState(null, "", "#training");  // until the user chooses
}

// ---- All runs

function showRuns({ runs, steps: done }) {
  const known = runs.map(({ tag }) => tag), chosen = runsShown.filter((tag) => known.includes(tag));
  const tags = chosen.length ? chosen : known.slice(0, 1);
  $("noRuns").hidden = runs.length > 0;
  $("pick").hidden = runs.length < 2;
  show($("pickList"), runs.map(({ tag, stages }) => {
    const box = el("input", { type: "checkbox", value: tag });
    box.toggleAttribute("checked", tags.includes(tag));  // as an attribute, which `show` compares
    const newest = Math.min(...Object.values(stages).map(({ age }) => age));
    return el("label", {}, box, el("span", {}, tag), el("span", { className: "small" }, newest < 120 ? " live" : ""));
  }));
  for (const box of $("pickList").querySelectorAll("input")) box.checked = tags.includes(box.value);
  for (const tag of runViews.keys()) if (!tags.includes(tag)) { runViews.get(tag).root.remove(); runViews.delete(tag); }
  for (const run of runs) {
    if (!tags.includes(run.tag)) continue;
    if (!runViews.has(run.tag)) runViews.set(run.tag, newRun(run.tag));
    const view = runViews.get(run.tag);
    if (!view.root.isConnected) $("runList").append(view.root);
    updateRun(view, run);
  }
  showSteps(done, secondsLeft(lastRuns, Date.now() / 1000));
}

/**
 * Seconds left for the whole speedrun: for a running training, from its own steps; for steps to come, the estimate, times
 * how much longer than estimated the others took. Null if unknown: no estimate, a step that failed or is stuck.
 */
function secondsLeft({ runs, steps: done, expected }, now) {
  const names = Object.keys(expected), at = names.indexOf(done.at(-1)?.name);
  if (at < 0 || done.at(-1).code) return null;
  const trainings = Object.fromEntries(runs.flatMap(({ tag, stages }) => Object.entries(stages).map(([stage, state]) => [`${stage}-${tag}`, state])));
  let took = 60, planned = 60, left = 0;  // at first the estimate counts as right for a minute's work
  for (const step of done) {
    const training = trainings[step.name], whole = expected[step.name], atWork = step === done.at(-1) && !step.ended;
    const isNew = training && now - training.age > step.began, known = atWork && isNew && training.step >= 10;  // the first step compiles
    // A resumed training has run before this start as well.
    const spent = Math.max((step.ended ?? now) - step.began, isNew ? training.elapsed : 0);
    if (atWork) {
      // Present delays may end, so the mean of all steps counts if it gives less.
      left = known ? Math.min(training.left, training.elapsed * (training.steps / training.step - 1)) : Math.max(0, whole * took / planned - spent);
      if (known ? isQuiet(training) : spent > 60 + 3 * whole * took / planned) return null;
    }
    if (whole && (known || step.ended && !step.code)) { took += spent + left; planned += whole; }
  }
  left += names.slice(at + 1).reduce((sum, name) => sum + expected[name], 0) * took / planned;
  return left > 0 ? left : null;  // null also if a file is damaged
}

/** The steps of the speedrun, if there is one: the current step, how long each took, and the time left. */
function showSteps(done, left) {
  const last = done.at(-1);
  $("speedrun").hidden = !last;
  if (!last) return;
  if (!$("noRuns").hidden && !$("speedrun").dataset.seen) $("speedrun").open = $("speedrun").dataset.seen = true;  // there is nothing else yet
  const now = Date.now() / 1000, took = (step) => (step.ended ?? now) - step.began;
  const all = done.reduce((sum, step) => sum + took(step), 0), failed = last.code ? `, ended with code ${last.code}` : "";
  const doing = last.ended ? `last step ${last.name}${failed || ", done"}` : `now ${last.name}, for ${span(took(last))}`;
  const about = left === null ? "" : `, about ${left < 90 ? "a minute" : left < 5400 ? `${Math.round(left / 60)} minutes` : `${(left / 3600).toFixed(1)} hours`} left`;
  $("speedrunNow").textContent = `Speedrun: ${doing}; ${span(all)} in all${about}`;
  show($("speedrunSteps"), done.map((step) => el("tr", {}, el("th", { scope: "row" }, step.name),
    el("td", { className: "right" }, step.ended || step === last ? span(took(step)) : "stopped"))));
}

// ---- One run

function newRun(tag) {
  const view = { stage: "", at: null, charts: new Map(), buttons: {} };
  view.title = el("h2", {}, tag);
  view.now = el("p", { className: "now" });
  view.bar = el("progress", { max: 1, ariaLabel: "Finished steps of this stage" });
  for (const [stage, name] of Object.entries(STAGES)) {
    const state = el("span", { className: "small" });
    const open = el("button", { type: "button", onclick: () => { view.stage = stage; view.at = null; showRuns(lastRuns); } }, el("span", {}, name), state);
    view.buttons[stage] = { open, state };
  }
  view.stages = el("div", { className: "stages", role: "group", ariaLabel: "Stages" }, ...Object.values(view.buttons).map(({ open }) => open));
  view.chartList = el("div", { className: "charts" });
  view.range = el("input", { type: "range", ariaLabel: "Samples at step" });
  view.range.oninput = () => { view.at = Number(view.range.value); showRuns(lastRuns); };
  view.rangeText = el("output", { className: "small" });
  view.texts = el("dl");
  view.samples = el("section", {}, el("h3", {}, "What it writes"), el("div", { className: "range" }, view.range, view.rangeText), view.texts);
  view.rows = el("tbody");
  view.heads = el("tr");
  view.table = el("section", {}, el("h3", {}, "Held-out scores"), el("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: `Held-out scores of ${tag}` },
    el("table", {}, el("thead", {}, view.heads), view.rows)));
  view.root = el("article", { className: "run", ariaLabel: tag }, view.title, view.now, view.bar, view.stages, view.chartList, view.samples, view.table);
  return view;
}

/** Whether a stage has been silent for longer than its steps explain. */
const isQuiet = ({ step, age, elapsed }) => age > Math.max(120, step ? 20 * elapsed / step : 0);

/** A stage in words: done, at work, or silent for longer than its steps explain. */
function describe(stage) {
  const { step, steps: all, age, done, elapsed, left, last } = stage, quiet = isQuiet(stage);
  if (done) return `done in ${span(elapsed)}`;
  if (!last["train/loss"]) return quiet ? "not begun" : "about to begin";
  const where = all ? `step ${steps(step)} of ${steps(all)}` : `step ${steps(step)}`;
  if (quiet) return `${where}, silent${age < 1e9 ? ` for ${span(age)}` : ""}`;  // version 0.1.0 noted no time
  return left === null ? where : `${where}, ${span(left)} left`;
}

function updateRun(view, { tag, stages, results }) {
  const names = Object.keys(STAGES).filter((stage) => stage in stages);
  const newest = names.reduce((a, b) => stages[b].age <= stages[a].age ? b : a);
  const shown = view.stage in stages ? view.stage : newest, stage = stages[shown];
  const planned = Object.keys(STAGES).filter((name) => `${name}-${tag}` in lastRuns.expected);  // by the speedrun
  for (const [name, { open, state }] of Object.entries(view.buttons)) {
    open.hidden = !(name in stages) && planned.length > 0 && !planned.includes(name);
    open.disabled = !(name in stages);
    open.ariaPressed = String(name === shown);
    state.textContent = name in stages ? describe(stages[name]) : "to come";
  }
  view.now.textContent = `${STAGES[newest]}: ${describe(stages[newest])}`;
  view.bar.value = stages[newest].steps ? stages[newest].step / stages[newest].steps : 0;
  for (const chart of CHARTS) {
    const points = stage.curves[chart.name] ?? [];
    if (!view.charts.has(chart.name)) {
      view.charts.set(chart.name, newChart(chart));
      view.chartList.append(view.charts.get(chart.name).root);
    }
    const drawn = view.charts.get(chart.name), title = shown === "base" ? chart.title : chart.later ?? chart.title;
    drawn.title.textContent = title;
    drawn.box.ariaLabel = `${title}${chart.unit && ", "}${chart.unit}`;
    updateChart(drawn, chart, points, chart.floor ? stage.last["val/floor"] : undefined, stage.steps);
  }
  updateSamples(view, stage.samples, shown);
  updateTable(view, results);
}

function updateSamples(view, samples, stage) {
  view.samples.hidden = !samples.length;
  if (!samples.length) return;
  const at = view.at === null ? samples.length - 1 : Math.min(view.at, samples.length - 1), [step, texts] = samples[at];
  view.at = at === samples.length - 1 ? null : at;  // at the end the slider follows the run
  Object.assign(view.range, { min: 0, max: samples.length - 1, value: at });
  view.range.ariaValueText = `step ${step}`;
  view.range.hidden = samples.length < 2;
  const noise = stage === "base" && !step ? ": a new model is untrained, so it writes noise" : "";
  view.rangeText.textContent = `at step ${steps(step)}${noise}${at || noise ? "" : ", the first"}${view.at === null && at ? ", the newest" : ""}`;
  const pairs = Array.isArray(texts) ? texts.filter(Array.isArray) : [];  // a log may hold anything
  show(view.texts, pairs.flatMap(([question, answer]) => [el("dt", {}, question), el("dd", {}, answer || "(nothing)")]));
}

function updateTable(view, results) {
  const rows = Object.entries(results), columns = Object.keys(STAGES).filter((stage) => rows.some(([, row]) => stage in row));
  view.table.hidden = !rows.length;
  show(view.heads, [el("td"), ...columns.map((stage) => el("th", { scope: "col", className: "right" }, STAGES[stage]))]);
  show(view.rows, rows.map(([name, row]) => el("tr", {}, el("th", { scope: "row" }, name), ...columns.map((stage) => {
    const value = row[stage];
    return el("td", { className: "right" }, value === undefined ? "–" : typeof value === "number" ? figure(value) : String(value));
  }))));
}

// ---- A chart, drawn by hand: an SVG as wide as its container, a cursor for mouse, finger and arrow keys, and a table

function newChart({ title, unit, scale, help = "" }) {
  const view = { points: [], at: null };
  view.value = el("output");
  view.plot = svg("svg", { "aria-hidden": "true" });
  view.box = el("div", { className: "plot", tabIndex: 0, role: "slider", ariaLabel: `${title}${unit && ", "}${unit}` });
  view.box.append(view.plot);
  view.rows = el("tbody");
  view.table = el("details", {}, el("summary", { className: "small" }, "as a table"), el("table", {},
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "step"), el("th", { scope: "col", className: "right" }, unit || "value"))), view.rows));
  view.below = el("span", { className: "small" });
  view.root = el("figure", {}, el("figcaption", { title: help }, view.title = el("span", {}, title), view.below, view.value), view.box, view.table);
  const move = (at) => { view.at = at; view.redraw(); };
  view.box.onpointermove = ({ clientX }) => {
    const x = clientX - view.box.getBoundingClientRect().left, near = ([step]) => Math.abs(view.x(step) - x);
    if (view.points.length) move(view.points.reduce((best, point, i) => near(point) < near(view.points[best]) ? i : best, 0));
  };
  view.box.onpointerleave = view.box.onblur = () => move(null);
  view.box.onkeydown = (event) => {
    const last = view.points.length - 1, at = view.at ?? last, far = Math.ceil(last / 10);
    const to = { ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - far, PageUp: at + far, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(Math.max(0, Math.min(last, to)));
  };
  new ResizeObserver(() => view.redraw?.()).observe(view.box);
  return view;
}

function updateChart(view, { name, unit, scale }, points, floor, allSteps) {
  const positive = points.every(([, value]) => value > 0);  // a policy's loss may be negative: no logarithm
  const log = scale === "log" && positive;
  view.root.hidden = !points.length;
  if (!points.length) return;
  view.points = points;
  view.at = view.at === null ? null : Math.min(view.at, points.length - 1);
  view.redraw = () => {
    const width = view.box.clientWidth || 320, height = 150, left = 46, right = 8, top = 8, bottom = 20;
    const values = [...points.map(([, value]) => value), ...(floor ? [floor] : [])];
    let low = Math.min(...values), high = Math.max(...values);
    if (scale === "zero" || scale === "percent") low = Math.min(0, low);
    if (scale === "percent") high = Math.max(1, high);
    if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 1, high + 1];
    const level = log ? Math.log : (value) => value, end = Math.max(allSteps, points.at(-1)[0], 1);
    view.x = (step) => left + (width - left - right) * step / end;
    const y = (value) => height - bottom - (height - top - bottom) * (level(value) - level(low)) / (level(high) - level(low));
    const line = (x1, y1, x2, y2, className) => svg("line", { x1, y1, x2, y2, class: className });
    const text = (x, y, anchor, words) => svg("text", { x, y, "text-anchor": anchor }, words);
    const grid = ticks(low, high, log).flatMap((value) => [line(left, y(value), width - right, y(value), "grid"),
      text(left - 6, y(value) + 4, "end", scale === "percent" ? `${Math.round(100 * value)}%` : short(value))]);
    const [last] = points.at(-1), at = points[view.at ?? points.length - 1];
    const marks = points.length < 30 ? points.map(([step, value]) => svg("circle", { cx: view.x(step), cy: y(value), r: 3 })) : [];
    view.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    view.plot.replaceChildren(...grid, text(left, height - 4, "start", "0"), text(width - right, height - 4, "end", `step ${steps(end)}`),
      ...(floor ? [line(left, y(floor), width - right, y(floor), "floor")] : []),
      svg("polyline", { points: points.map(([step, value]) => `${view.x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") }), ...marks,
      ...(view.at === null ? [] : [line(view.x(at[0]), top, view.x(at[0]), height - bottom, "cursorLine")]),
      svg("circle", { cx: view.x(at[0]), cy: y(at[1]), r: 4, class: "here" }));
    const floorWords = floor ? `, floor ${figure(floor)}` : "";
    view.value.textContent = figure(at[1], scale);
    view.below.textContent = `${unit}${view.at === null ? floorWords : `, at step ${steps(at[0])}`}`;
    Object.assign(view.box, { ariaValueMin: "0", ariaValueMax: String(last), ariaValueNow: String(at[0]), ariaValueText: `step ${steps(at[0])}: ${figure(at[1], scale)} ${unit}${floorWords}` });
  };
  view.redraw();
  const every = Math.ceil(points.length / 12), some = points.filter((point, i) => (points.length - 1 - i) % every === 0);
  show(view.rows, some.map(([step, value]) => el("tr", {}, el("td", {}, steps(step)), el("td", { className: "right" }, figure(value, scale)))));
}

function short(value) { return value >= 1e6 ? `${+(value / 1e6).toPrecision(3)}M` : value >= 1e4 ? `${+(value / 1e3).toPrecision(3)}k` : figure(value); }

/** Two to six round numbers between two values. */
function ticks(low, high, log) {
  const round = [];
  if (log) {
    for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) for (const digit of [1, 2, 5]) round.push(digit * power);
    const inside = round.filter((value) => value >= low && value <= high);
    if (inside.length > 1) return inside.length > 6 ? inside.filter((value, i) => i % 3 === 0) : inside;
  }
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 5, 10].find((digit) => digit * power >= rough);
  const count = Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
  return Array.from({ length: count }, (_, i) => (Math.ceil(low / step - 1e-9) + i) * step);
}

if (WATCHES) {
  $("views").hidden = false;
  $("pickList").onchange = () => {
    runsShown = [...$("pickList").querySelectorAll(":checked")].map(({ value }) => value);
    keep("localStorage", "runs", runsShown);
    showRuns(lastRuns);
  };
  window.onhashchange = () => { showView(); poll(); };
  document.onvisibilitychange = () => { if (!document.hidden) poll(); };
}
