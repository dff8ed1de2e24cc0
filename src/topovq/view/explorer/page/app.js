// The page: one panel a run, and what they share: the image, the shift, the tool, the edits, undo and the address.
import { RunPanel } from "./panel.js";
import { History } from "./history.js";
import { Images } from "./images.js";
import { ShiftPad } from "./shift.js";
import { apply, decodeEdits, encodeEdits, replay } from "./edits.js";
import { readLink, writeLink } from "./link.js";
import { api, say } from "./api.js";

const $ = (id) => document.getElementById(id);
const ADVICE = {
  look: "Point at a token to see its code on the map, or at a code to see its tokens.",
  paint: "Click a code on the map to pick it, then draw it into the mosaic.",
  swap: "Choose a second image, then drag over a region of the mosaic (or press Enter at two corners) to exchange its tokens.",
};

const shared = { tool: "look", shift: [], edits: [], panels: [] };
const panels = () => shared.panels;
let secondNext = false;

// What undo and redo go between

const undoing = new History(
  () => ({ shift: shared.shift, edits: shared.edits, works: panels().map((panel) => panel.work) }),
  ({ shift, edits, works }) => {
    Object.assign(shared, { shift, edits });
    pad.show();
    panels().forEach((panel, number) => panel.setWork(works[number]));
    images.mark(works[0].image);
  },
  showUndo,
);
const about = (gesture) => undoing.about(gesture);
const pad = new ShiftPad(shared, about, () => {
  panels().forEach((panel) => panel.update());
  showUndo();
});
const images = new Images((image) => guarded(() => choose(image)));

const moved = () => shared.shift.some((shift) => shift.some(Boolean));
const still = () => shared.shift.map(() => [0, 0]);

function showUndo() {
  $("undo").disabled = !undoing.past.length;
  $("redo").disabled = !undoing.future.length;
  $("over").disabled = !moved() && shared.edits.every(([kind]) => kind === "i");
  writeLink(told);
}
shared.changed = showUndo;

async function guarded(work) {
  try {
    await work();
    return true;
  } catch (error) {
    say(error.message, true);
    return false;
  }
}

// Images

async function choose(image) {
  const found = await Promise.all(panels().map((panel) => panel.encoded(image)));
  about();
  if (secondNext) {
    secondNext = false;
    showTool();
    shared.edits = [...shared.edits, ["i", image.set, image.index]];
    panels().forEach((panel, number) => panel.setWork({ ...panel.work, second: found[number] }));
    say(`${image.label} is the second image`);
  } else {
    startWith(found);
    images.mark(image);
    say(image.label);
  }
  showUndo();
}

// Begin with these images, one for each run, unedited; the second image stays.
function startWith(works) {
  panels().forEach((panel, number) => {
    const second = panel.work?.second;
    panel.setWork({ ...works[number], base: works[number].first, second: second && { ...second, base: second.first } });
  });
  const chosen = shared.edits.findLast(([kind]) => kind === "i");
  shared.edits = chosen ? [chosen] : [];
}

function startOver() {
  about();
  shared.shift = still();
  pad.show();
  startWith(panels().map((panel) => panel.work));
  showUndo();
}

// Edits, the same in every run

async function edit(step, gesture = null) {
  if (moved()) await Promise.all(panels().map((panel) => panel.update.idle()));
  about(gesture);
  if (moved()) {
    panels().forEach((panel) => panel.settle());
    shared.edits = [...shared.edits, ["m", ...shared.shift.flat()]];
    shared.shift = still();
    pad.show();
  }
  apply(step, panels());
  shared.edits = [...shared.edits, step];
  panels().forEach((panel) => panel.pointAgain());
  showUndo();
}

shared.paint = (panel, [row, column], gesture) => {
  if (panel.picked === null) {
    say("Pick a code on the map first: click it, or press Enter on it.", true);
    return;
  }
  if (panel.shown[panel.which][row][column] === panel.picked) return;
  edit(["f", panel.number, panel.which, row, column, row, column, ...panels().map((each) => each.picked)], gesture);
};

shared.swap = (panel, a, b) => {
  if (!panel.work.second) {
    say("Choose the second image first.", true);
    return;
  }
  const [top, left] = [Math.min(a[0], b[0]), Math.min(a[1], b[1])];
  const [bottom, right] = [Math.max(a[0], b[0]), Math.max(a[1], b[1])];
  edit(["x", panel.number, panel.which, top, left, bottom, right]);
  say(`exchanged ${bottom - top + 1} x ${right - left + 1} tokens with the second image`);
};

shared.showMaps = async (which, view) => {
  await Promise.all(panels().map((panel) => panel.show(which, view)));
  showUndo();
};

// The address

function told() {
  const [first] = panels();
  if (!first?.work) return {};
  const { image } = first.work;
  return {
    image: `${image.set}/${image.index}`,
    shift: moved() ? shared.shift.map((shift) => shift.join(",")).join("_") : "",
    map: first.which || "",
    view: first.map.view === "codes" ? "" : first.map.view,
    tool: shared.tool === "look" ? "" : shared.tool,
    pick: first.picked === null ? "" : first.picked,
    edits: encodeEdits(shared.edits),
  };
}

// Bring back what a link tells of; what does not fit is said and left out.
async function restore(link) {
  const tool = document.querySelector(`input[name=tool][value="${CSS.escape(link.tool ?? "look")}"]`);
  if (tool) tool.checked = true;
  showTool();
  const views = [...panels()[0].$(".view").options].map((option) => option.value);
  const view = views.includes(link.view) ? link.view : "codes";
  await Promise.all(panels().map((panel) => panel.show(Math.max(0, Number(link.map) || 0), view)));
  const [set, index] = (link.image ?? "").split("/");
  const image = link.image ? images.of(set, Number(index)) : images.first;
  const shown = image ?? images.first;
  const found = await Promise.all(panels().map((panel) => panel.encoded(shown)));
  Object.assign(shared, { shift: still(), edits: [] });
  panels().forEach((panel, number) => panel.setWork(found[number]));
  const steps = image ? decodeEdits(link.edits) : [];
  shared.edits = await replay(steps, panels(), (name, number) => images.of(name, number));
  const moves = (link.shift ?? "").split("_").map((pair) => pair.split(",").map((n) => Math.max(-99, Math.min(99, Math.round(Number(n)) || 0))));
  shared.shift = shared.shift.map((_, number) => (moves[number]?.length === 2 ? moves[number] : [0, 0]));
  pad.show();
  await Promise.all(panels().map((panel) => panel.update()));
  if (link.pick !== undefined && Number(link.pick) < panels()[0].map.data.places.length) panels()[0].pick(Number(link.pick));
  $("set").value = shown.set;
  images.current = shown;
  images.show();
  if (!image) say("The link's image is not here: images that were opened by hand are not in a link.", true);
  else if (shared.edits.length < steps.length) say("Some edits of the link do not fit; they were left out.", true);
  else say(shown.label);
  showUndo();
}

async function begin() {
  const info = await api("run");
  info.runs.forEach((run, number) => {
    const panel = new RunPanel(run, number, shared);
    panels().push(panel);
    $("runs").append(panel.element);
    $("readouts").append(panel.readout);
  });
  $("runs").dataset.count = $("readouts").dataset.count = info.runs.length;
  const filmed = info.runs.findIndex((run) => run.film);
  $("film").hidden = filmed < 0;
  $("film").href = `film.html?run=${filmed}`;
  $("generate").hidden = !info.prior;
  const { maps } = info.runs[0];
  const most = Math.max(...info.runs.map((run) => run.maps.length));
  shared.shift = Array.from({ length: most }, () => [0, 0]);
  $("target").append(new Option(maps.length > 1 ? "all maps" : "the map", "all"));
  if (maps.length > 1) maps.forEach((map, number) => $("target").append(new Option(`${map.name} alone`, number)));
  $("levels").hidden = maps.length === 1;
  document.title = `${info.runs.map((run) => run.name).join(" and ")}: topovq explorer`;
  images.begin(info);
  const link = readLink();
  await restore(link);
  if (!Object.keys(link).length) $("pad").focus({ preventScroll: true, focusVisible: true }); // the arrow keys shift at once
}

// Tools and keys

function showTool() {
  shared.tool = document.querySelector("input[name=tool]:checked").value;
  $("second").hidden = shared.tool !== "swap";
  $("second").textContent = secondNext ? "Now choose the second image" : "Choose the second image";
  $("advice").textContent = ADVICE[shared.tool];
  panels().forEach((panel) => panel.showSecond());
}
document.querySelectorAll("input[name=tool]").forEach((input) =>
  input.addEventListener("change", () => {
    showTool();
    showUndo();
  }),
);
$("second").addEventListener("click", () => {
  secondNext = !secondNext;
  showTool();
});
$("undo").addEventListener("click", () => undoing.undo());
$("redo").addEventListener("click", () => undoing.redo());
$("over").addEventListener("click", startOver);
$("help-button").addEventListener("click", () => $("help").showModal());
addEventListener("keydown", (event) => {
  const key = event.key.toLowerCase();
  if ((event.ctrlKey || event.metaKey) && (key === "z" || key === "y")) {
    event.preventDefault();
    if (key === "y" || event.shiftKey) undoing.redo();
    else undoing.undo();
  } else if (event.key === "?" && !$("help").open) $("help").showModal();
});
addEventListener("hashchange", () => {
  about();
  guarded(() => restore(readLink()));
});
addEventListener("resize", () => panels().forEach((panel) => panel.draw()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => panels().forEach((panel) => panel.draw()));

showTool();
guarded(begin);
