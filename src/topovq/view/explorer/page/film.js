// The film of a training: a slider over its snapshots. While the run goes on, new ones are asked for and shown.
import { legend } from "./colors.js";
import { MapCanvas } from "./map.js";
import { api, latest, saveAnswer, say } from "./api.js";

const $ = (id) => document.getElementById(id);
const SOON = 1000; // milliseconds between looks for new frames
const SECONDS = 8; // that the film takes
const KEPT = 200; // frames
const run = Number(new URLSearchParams(location.search).get("run")) || 0;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let film = { steps: [], validations: [], finished: false };
let playing = null;
let following = true; // the newest frame is shown as it comes, until one looks at another
const frames = new Map();

const shown = () => film.steps[Number($("slider").value)];

async function frameOf(step) {
  const key = `${step} ${$("map").value || 0}`;
  if (!frames.has(key)) {
    const frame = await api(`frame?run=${run}&map=${$("map").value || 0}&step=${step}`);
    const sheet = new Image();
    sheet.src = frame.sheet.image;
    await sheet.decode();
    if (frames.size >= KEPT) frames.delete(frames.keys().next().value);
    frames.set(key, { ...frame, canvas: new MapCanvas($("canvas"), { ...frame, map: { grid: frame.grid } }, sheet) });
  }
  return frames.get(key);
}

const show = latest(async () => {
  const step = shown();
  if (step === undefined) return;
  const frame = await frameOf(step);
  if (!$("map").options.length) {
    frame.maps.forEach((name, number) => $("map").append(new Option(name, number)));
    $("which").hidden = frame.maps.length === 1;
  }
  frame.canvas.view = $("view").value;
  frame.canvas.fit();
  frame.canvas.draw();
  legend(document.querySelector(".legend"), $("view").value, frame);
  $("canvas").dataset.step = step;
  $("strip").src = frame.strip;
  $("step").textContent = `step ${step.toLocaleString("en")}${film.total ? ` of ${film.total.toLocaleString("en")}` : ""}`;
  $("slider").setAttribute("aria-valuetext", $("step").textContent);
  drawLosses(step);
});

function drawLosses(step) {
  const { validations } = film;
  $("curve").hidden = validations.length < 2;
  if (validations.length < 2) return;
  const canvas = $("losses");
  const context = canvas.getContext("2d");
  const logs = validations.map(({ loss }) => Math.log(loss));
  const [low, high] = [Math.min(...logs), Math.max(...logs)];
  const across = (at) => 12 + (776 * at) / (film.total ?? validations.at(-1).step);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.beginPath();
  validations.forEach((each, i) => context[i ? "lineTo" : "moveTo"](across(each.step), 228 - (216 * (logs[i] - low)) / (high - low || 1)));
  context.lineWidth = 4;
  context.strokeStyle = color("--accent");
  context.stroke();
  context.beginPath();
  context.moveTo(across(step), 0);
  context.lineTo(across(step), canvas.height);
  context.lineWidth = 3;
  context.strokeStyle = color("--lit");
  context.stroke();
  const past = validations.filter((each) => each.step <= step).at(-1);
  $("loss").textContent = past ? `validation loss ${past.loss.toPrecision(3)} at step ${past.step.toLocaleString("en")} (log scale)` : "validation loss (log scale)";
}

// Look for new frames, now and then until the training is over.
async function look() {
  try {
    film = await api(`film?run=${run}`);
    const { steps } = film;
    document.title = `${film.name}: topovq film`;
    const at = Number($("slider").value);
    $("slider").max = Math.max(0, steps.length - 1);
    if (following) $("slider").value = steps.length - 1;
    else $("slider").value = Math.min(at, steps.length - 1);
    $("slider").disabled = $("play").disabled = $("save").disabled = steps.length < 2;
    if (steps.length) {
      const state = film.finished ? "the training is finished" : "in training, new steps appear here";
      say(`${film.name}: ${steps.length} ${steps.length === 1 ? "picture" : "pictures"}, ${state}`);
      await show();
    } else say(`${film.name} has no picture yet; waiting for the first snapshot or checkpoint`);
  } catch (error) {
    say(error.message, true);
  }
  if (!film.finished) setTimeout(look, SOON);
}

// Play

function stop() {
  clearInterval(playing);
  playing = null;
  $("play").textContent = "Play";
}

function play() {
  if (playing) return stop();
  const { value, max } = $("slider");
  if (value === max) $("slider").value = 0;
  following = false;
  $("play").textContent = "Pause";
  playing = setInterval(() => {
    const slider = $("slider");
    if (Number(slider.value) >= Number(slider.max)) {
      stop();
      following = true;
      return;
    }
    slider.value = Number(slider.value) + 1;
    show();
  }, (1000 * SECONDS) / Math.max(16, film.steps.length));
  show();
}

$("play").addEventListener("click", play);
$("slider").addEventListener("input", () => {
  stop();
  following = $("slider").value === $("slider").max;
  show();
});
for (const id of ["map", "view"]) $(id).addEventListener("change", show);
$("save").addEventListener("click", async () => {
  say("drawing the animation …");
  try {
    await saveAnswer(`animation?run=${run}&map=${$("map").value || 0}`, null, `${film.name}.webp`);
    say("the animation is saved");
  } catch (error) {
    say(error.message, true);
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);

// A finished training is played once, unless one would rather not see things move.
await look();
if (film.finished && film.steps.length > 2 && !matchMedia("(prefers-reduced-motion: reduce)").matches) play();
