// Drawing with a prior: new images, and the rest of one whose tokens were painted out.
import { Images } from "./images.js";
import { api, say } from "./api.js";

const $ = (id) => document.getElementById(id);
const COVER = "#d0006f"; // of what is painted out
const canvas = $("painting");

let prior = null; // what /api/prior tells
let work = null; // the image that is painted on: its tokens, picture and label
let painted = []; // [row][column], whether a token is painted out
let place = [0, 0]; // where the keyboard is
let stroke = null; // what a drag does: paint out (true) or bring back (false)

const nothing = () => Array.from({ length: prior.height }, () => Array(prior.width).fill(false));
const count = () => painted.flat().filter(Boolean).length;

// The image, and what is painted out of it

function show() {
  const context = canvas.getContext("2d");
  const [wide, tall] = [canvas.width / prior.width, canvas.height / prior.height];
  context.imageSmoothingEnabled = false;
  context.drawImage(work.picture, 0, 0, canvas.width, canvas.height);
  painted.forEach((row, y) =>
    row.forEach((out, x) => {
      if (!out) return;
      context.fillStyle = COVER;
      context.fillRect(x * wide, y * tall, wide, tall);
    }),
  );
  if (document.activeElement === canvas && canvas.matches(":focus-visible")) {
    context.lineWidth = 4;
    context.strokeStyle = "#fff";
    context.strokeRect(place[1] * wide + 2, place[0] * tall + 2, wide - 4, tall - 4);
  }
  const tokens = prior.height * prior.width;
  $("painted").textContent = count()
    ? `${count()} of ${tokens} tokens are painted out. They are drawn anew.`
    : "Drag over the image to paint tokens out. What is painted out is drawn anew.";
  $("complete").disabled = !count();
  $("keep").disabled = !count();
}

function paint([row, column], out) {
  if (painted[row]?.[column] === undefined || painted[row][column] === out) return;
  painted[row][column] = out;
  show();
}

function under(event) {
  const box = canvas.getBoundingClientRect();
  const at = (value, size, places) => Math.max(0, Math.min(places - 1, Math.floor((value / size) * places)));
  return [at(event.clientY - box.top, box.height, prior.height), at(event.clientX - box.left, box.width, prior.width)];
}

canvas.addEventListener("pointerdown", (event) => {
  if (!work) return;
  canvas.setPointerCapture(event.pointerId);
  place = under(event);
  stroke = !painted[place[0]][place[1]];
  paint(place, stroke);
});
canvas.addEventListener("pointermove", (event) => stroke !== null && paint(under(event), stroke));
for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (stroke = null));
canvas.addEventListener("keydown", (event) => {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (!work || !(event.key in moves || event.key === "Enter" || event.key === " ")) return;
  event.preventDefault();
  if (event.key in moves) {
    const [down, right] = moves[event.key];
    place = [
      Math.max(0, Math.min(prior.height - 1, place[0] + down)),
      Math.max(0, Math.min(prior.width - 1, place[1] + right)),
    ];
    show();
  } else paint(place, !painted[place[0]][place[1]]);
});
for (const end of ["focus", "blur"]) canvas.addEventListener(end, () => work && show());

async function use(tokens, address, label) {
  const picture = new Image();
  picture.src = address;
  await picture.decode();
  work = { tokens, picture, label };
  painted = nothing();
  show();
  say(label);
}

const images = new Images(async (image) => {
  try {
    const found = await api("encode", { run: 0, ...image.request });
    await use(found.tokens, found.reconstruction, image.label);
    images.mark(image);
    return true;
  } catch (error) {
    say(error.message, true);
    return false;
  }
});

// Drawing

function settings() {
  const label = $("label").value;
  return {
    number: Number($("number").value),
    seed: Number($("seed").value),
    temperature: Number($("temperature").value),
    top_p: Number($("top-p").value),
    ...(label === "" ? {} : { label: Number(label), guidance: Number($("guidance").value) }),
  };
}

async function draw(more, told) {
  const buttons = [$("sample"), $("complete")];
  buttons.forEach((button) => (button.disabled = true));
  $("drawn").setAttribute("aria-busy", "true");
  say("Drawing …");
  try {
    const found = await api("draw", { ...settings(), ...more });
    const items = found.images.map(({ tokens, image }, number) => {
      const item = document.createElement("li");
      const button = document.createElement("button");
      const picture = new Image();
      picture.src = image;
      picture.alt = `${told} ${number + 1}`;
      button.type = "button";
      button.title = "Paint on this one";
      button.append(picture);
      button.addEventListener("click", () => use(tokens, image, `${told} ${number + 1}`));
      item.append(button);
      return item;
    });
    $("drawn").replaceChildren(...items);
    say(`${items.length} ${told}s. Click one to go on with it.`);
    $("seed").value = Number($("seed").value) + 1; // the next ones are others
  } catch (error) {
    say(error.message, true);
  } finally {
    $("drawn").removeAttribute("aria-busy");
    $("sample").disabled = false;
    $("complete").disabled = !count();
  }
}

$("sample").addEventListener("click", () => draw({}, "new image"));
$("complete").addEventListener("click", () => draw({ tokens: work.tokens, painted }, "completion"));
$("keep").addEventListener("click", () => {
  painted = nothing();
  show();
});
$("lower").addEventListener("click", () => {
  painted = nothing().map((row, y) => row.map(() => y >= prior.height / 2));
  show();
});

async function begin() {
  const info = await api("run");
  if (!info.prior) {
    say("There is no prior here: start the explorer with --prior PRIOR.", true);
    return;
  }
  prior = await api("prior");
  document.title = `${prior.run}: generate`;
  if (prior.classes.length) {
    $("classes").hidden = false;
    $("label").addEventListener("change", () => ($("follow").hidden = $("label").value === ""));
    $("label").append(new Option("any", ""), ...prior.classes.map((name, number) => new Option(name, number)));
  }
  images.begin(info);
  $("sample").disabled = $("lower").disabled = false;
  await images.choose(images.first);
}
begin().catch((error) => say(error.message, true));
