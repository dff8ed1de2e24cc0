// The images to choose from: the server's sets, and those that were opened or dropped here.
import { say } from "./api.js";

const $ = (id) => document.getElementById(id);
const SHOWN = 48;
const ENOUGH = 1024; // pixels of the short side that are sent of a large photograph
const OPENED = "opened";
const NAMES = { samples: ["photographs", "photograph"] }; // how a set is called here, and one image of it

export class Images {
  // `choose(image)` is called with { request, label, set, index }.
  constructor(choose) {
    Object.assign(this, { choose, sets: [], opened: [], limits: {}, current: null });
    $("set").addEventListener("change", () => this.show());
    $("file").addEventListener("change", () => {
      this.open($("file").files[0]);
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
      this.open(event.dataTransfer.files[0]);
    });
  }

  begin(info) {
    this.sets = info.images.filter((set) => set.count);
    this.limits = { bytes: info.most_upload_bytes, pixels: info.most_pixels };
    for (const set of this.sets) $("set").append(new Option(`${NAMES[set.name]?.[0] ?? set.name} (${set.count})`, set.name));
    this.show();
  }

  // The image to begin with.
  get first() {
    return this.of(this.sets[0].name, this.sets[0].first);
  }

  // Image `index` of a set; null where there is none.
  of(name, index) {
    if (name === OPENED) return this.opened[index] ?? null;
    const set = this.sets.find((each) => each.name === name);
    if (!set || !(index >= 0 && index < set.count)) return null;
    const label = `${NAMES[name]?.[1] ?? `${name} image`} ${index}`;
    return { request: { set: name, index }, label, set: name, index, source: `api/images/${name}/${index}` };
  }

  show() {
    const name = $("set").value;
    const count = name === OPENED ? this.opened.length : this.sets.find((each) => each.name === name).count;
    const buttons = Array.from({ length: Math.min(count, SHOWN) }, (_, index) => {
      const image = this.of(name, index);
      const button = document.createElement("button");
      const picture = new Image();
      picture.src = image.source;
      picture.alt = image.label;
      picture.loading = "lazy";
      button.type = "button";
      button.role = "option";
      button.append(picture);
      button.addEventListener("click", () => this.choose(image));
      return button;
    });
    $("thumbnails").replaceChildren(...buttons);
    this.mark();
  }

  mark(current = this.current) {
    this.current = current;
    [...$("thumbnails").children].forEach((button, index) =>
      button.setAttribute("aria-selected", current?.set === $("set").value && current.index === index),
    );
  }

  // Open a file; the server says what is wrong with one that the browser cannot read.
  async open(file) {
    if (!file) return;
    const index = this.opened.length;
    const shrunk = await shrink(file, this.limits);
    if (shrunk.size > this.limits.bytes) {
      say(`${file.name} is larger than ${this.limits.bytes / 2 ** 20} MiB and cannot be shrunk here; send a smaller one`, true);
      return;
    }
    const source = await address(shrunk);
    const image = { request: { data: source.slice(source.indexOf(",") + 1) }, label: file.name, set: OPENED, index, source };
    if (!(await this.choose(image))) return;
    this.opened.push(image);
    if (!index) $("set").append(new Option("", OPENED));
    $("set").querySelector(`[value=${OPENED}]`).textContent = `opened (${index + 1})`;
    $("set").value = OPENED;
    this.show();
  }
}

// A photograph that is large in bytes or pixels is drawn smaller; others, and what is no image, are left as they are.
async function shrink(file, limits) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    return file;
  }
  const { width, height } = bitmap;
  if (file.size <= limits.bytes / 4 && width * height <= limits.pixels / 4) return file;
  const share = Math.min(1, ENOUGH / Math.min(width, height));
  const canvas = document.createElement("canvas");
  // Of a very long one the middle is enough: the model sees the central square.
  canvas.width = Math.min(4 * ENOUGH, Math.round(width * share));
  canvas.height = Math.min(4 * ENOUGH, Math.round(height * share));
  const [w, h] = [canvas.width / share, canvas.height / share];
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff"; // below what is transparent, as the server has it
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, (width - w) / 2, (height - h) / 2, w, h, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/jpeg", 0.92));
}

function address(blob) {
  return new Promise((done, fail) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => fail(reader.error);
    reader.readAsDataURL(blob);
  });
}
