// The page: one panel a run, and the image, the shift and the tool that they share.
import { RunPanel } from "./panel.js";
import { api, say } from "./api.js";

const $ = (id) => document.getElementById(id);
const ADVICE = {
  look: "Point at a token to see its code on the map, or at a code to see its tokens.",
  paint: "Click a code on the map to pick it, then draw it into the mosaic.",
  swap: "Choose a second image, then drag over a region of the mosaic (or press Enter at two corners) to exchange its tokens.",
};
const PAD = 6; // places from the middle of the pad to its edge

const shared = { tool: "look", shift: [], panels: [], current: null };
let sets = [];
let secondNext = false;

async function begin() {
  const info = await api("run");
  sets = info.images;
  info.runs.forEach((run, number) => {
    const panel = new RunPanel(run, number, shared);
    shared.panels.push(panel);
    $("runs").append(panel.element);
  });
  const maps = info.runs[0].maps;
  const most = Math.max(...info.runs.map((run) => run.maps.length));
  shared.shift = Array.from({ length: most }, () => [0, 0]);
  $("target").append(new Option(maps.length > 1 ? "all maps" : "the map", "all"));
  if (maps.length > 1) maps.forEach((map, number) => $("target").append(new Option(`${map.name} alone`, number)));
  $("levels").hidden = maps.length === 1;
  for (const set of sets) if (set.count) $("set").append(new Option(`${set.name} (${set.count})`, set.name));
  document.title = `${info.runs.map((run) => run.name).join(" and ")}: topovq explorer`;
  await Promise.all(shared.panels.map((panel) => panel.loadMap()));
  await choose({ set: $("set").value, index: 0 }, `${$("set").value} image 0`);
  showThumbnails();
}

function showThumbnails() {
  const set = sets.find((each) => each.name === $("set").value);
  const shown = Math.min(set.count, 48);
  $("thumbnails").replaceChildren(
    ...Array.from({ length: shown }, (_, index) => {
      const button = document.createElement("button");
      const image = new Image();
      image.src = `api/images/${set.name}/${index}`;
      image.alt = `${set.name} image ${index}`;
      image.loading = "lazy";
      button.type = "button";
      button.role = "option";
      button.append(image);
      button.addEventListener("click", () => choose({ set: set.name, index }, image.alt));
      return button;
    }),
  );
  markThumbnail();
}

function markThumbnail() {
  const { set, index } = shared.current ?? {};
  [...$("thumbnails").children].forEach((button, number) => button.setAttribute("aria-selected", set === $("set").value && index === number));
}

async function choose(image, label) {
  try {
    if (secondNext) {
      secondNext = false;
      await Promise.all(shared.panels.map((panel) => panel.useSecond(image)));
      showTool();
      say(`${label} is the second image`);
      return;
    }
    shared.current = image;
    await Promise.all(shared.panels.map((panel) => panel.useImage(image)));
    markThumbnail();
    say(label);
  } catch (error) {
    say(error.message, true);
  }
}

function chooseFile(file) {
  if (!file) return;
  const reader = new FileReader();
  reader.onload = () => choose({ data: reader.result.slice(reader.result.indexOf(",") + 1) }, file.name);
  reader.onerror = () => say(`${file.name} cannot be read`, true);
  reader.readAsDataURL(file);
}

// Shift

function targets() {
  return $("target").value === "all" ? shared.shift.map((_, number) => number) : [Number($("target").value)];
}

function setShift(dx, dy) {
  const clamp = (value) => Math.max(-99, Math.min(99, Math.round(value) || 0));
  for (const number of targets()) shared.shift[number] = [clamp(dx), clamp(dy)];
  showShift();
  shared.panels.forEach((panel) => panel.update());
}

function showShift() {
  const [dx, dy] = shared.shift[targets()[0]];
  if (document.activeElement !== $("dx") || Number($("dx").value) !== dx) $("dx").value = dx;
  if (document.activeElement !== $("dy") || Number($("dy").value) !== dy) $("dy").value = dy;
  const place = (value) => `${50 + (45 * Math.max(-PAD, Math.min(PAD, value))) / PAD}%`;
  $("knob").style.left = place(dx);
  $("knob").style.top = place(dy);
}

shared.resetShift = () => {
  shared.shift = shared.shift.map(() => [0, 0]);
  showShift();
};

function dragPad(event) {
  const box = $("pad").getBoundingClientRect();
  const along = (value, start, size) => ((value - start) / size - 0.5) * (PAD / 0.45);
  setShift(
    Math.max(-PAD, Math.min(PAD, along(event.clientX, box.left, box.width))),
    Math.max(-PAD, Math.min(PAD, along(event.clientY, box.top, box.height))),
  );
}

$("pad").addEventListener("pointerdown", (event) => {
  $("pad").setPointerCapture(event.pointerId);
  dragPad(event);
});
$("pad").addEventListener("pointermove", (event) => event.buttons && dragPad(event));
$("pad").addEventListener("keydown", (event) => {
  const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const [dx, dy] = shared.shift[targets()[0]];
  if (move) setShift(dx + move[0], dy + move[1]);
  else if (event.key === "Escape") reset();
  else return;
  event.preventDefault();
});
for (const id of ["dx", "dy"]) $(id).addEventListener("input", () => setShift($("dx").value, $("dy").value));
$("target").addEventListener("change", showShift);
function reset() {
  shared.resetShift();
  shared.panels.forEach((panel) => panel.update());
}
$("reset").addEventListener("click", reset);

// Tools and images

function showTool() {
  shared.tool = document.querySelector("input[name=tool]:checked").value;
  $("second").hidden = shared.tool !== "swap";
  $("second").textContent = secondNext ? "Now choose the second image" : "Choose the second image";
  $("advice").textContent = ADVICE[shared.tool];
}
document.querySelectorAll("input[name=tool]").forEach((input) => input.addEventListener("change", showTool));
$("second").addEventListener("click", () => {
  secondNext = !secondNext;
  showTool();
});
$("undo").addEventListener("click", () => {
  shared.resetShift();
  shared.panels.forEach((panel) => panel.undo());
});
$("set").addEventListener("change", showThumbnails);
$("file").addEventListener("change", () => {
  chooseFile($("file").files[0]);
  $("file").value = "";
});
addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
addEventListener("dragleave", (event) => event.relatedTarget || document.body.classList.remove("dropping"));
addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  chooseFile(event.dataTransfer.files[0]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => shared.panels.forEach((panel) => panel.draw()));

showTool();
begin().catch((error) => say(error.message, true));
