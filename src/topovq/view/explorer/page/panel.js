// One run on the page: its map, an image, the mosaic of its tokens, and what an edit does to them.
import { legend } from "./colors.js";
import { listenToMap, listenToMosaic } from "./hands.js";
import { MapCanvas, strokeOnAny } from "./map.js";
import { api, latest, save, saveAnswer, say } from "./api.js";

const copy = (planes) => planes.map((rows) => rows.map((row) => [...row]));
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Calls `change` with every row and column of a map that lies in the region.
function within(region, plane, change) {
  const ends = (low, high, size) => [Math.floor(low * size + 1e-6), Math.ceil(high * size - 1e-6)];
  const [top, bottom] = ends(region[0], region[2], plane.length);
  const [left, right] = ends(region[1], region[3], plane[0].length);
  for (let row = top; row < bottom; row++) for (let column = left; column < right; column++) change(row, column);
}

export class RunPanel {
  // `work` is what undo puts back, never changed but replaced: an image, its tokens as they are, and the second image.
  // `shown` are the tokens after the shift; `code` is pointed at, `picked` was clicked, `cursor` is a token's row and column.
  constructor(info, number, shared) {
    Object.assign(this, { info, number, shared, which: 0, maps: new Map(), work: null, shown: null });
    Object.assign(this, { code: null, picked: null, cursor: null, corner: null, ends: {}, path: [] });
    this.element = document.getElementById("run").content.firstElementChild.cloneNode(true);
    this.element.dataset.run = number;
    this.$ = (selector) => this.element.querySelector(selector);
    this.readout = document.getElementById("readout").content.firstElementChild.cloneNode(true);
    this.readout.dataset.of = number;
    this.$("h2").textContent = this.$(".of").textContent = info.name;
    this.element.setAttribute("aria-label", info.name);
    const sizes = info.maps.map((map) => `${map.grid.shape.join(" x ")} ${map.grid.topology}`);
    const learned = info.loss === null ? "" : `, validation loss ${info.loss.toFixed(4)}, ${Math.round(info.usage * 100)}% of the codes chosen${info.tokens ? ` in ${info.tokens.toLocaleString("en")} tokens` : ""}`;
    this.$(".facts").textContent = `${info.model}, ${info.quantizer}, ${[...new Set(sizes)].join(" and ")}${learned}`;
    info.maps.forEach((map, each) => this.$(".map-choice").append(new Option(map.name, each)));
    this.$(".which").hidden = info.maps.length === 1;
    this.update = latest(() => this.decode(), this.element);
    this.updateSecond = latest(() => this.decodeSecond(), this.$(".other"));
    this.listen();
  }

  get map() {
    return this.maps.get(this.which);
  }

  // Show a map (a run with fewer of them shows its last) in a view.
  async show(which, view) {
    which = Math.min(which, this.info.maps.length - 1);
    if (!this.maps.has(which)) {
      const data = await api(`map?run=${this.number}&map=${which}`);
      const sheet = new Image();
      sheet.src = data.sheet.image;
      await sheet.decode();
      this.maps.set(which, new MapCanvas(this.$(".map"), data, sheet));
    }
    if (which !== this.which) {
      Object.assign(this, { which, code: null, picked: null, cursor: null, corner: null });
      this.clearPath();
    }
    this.$(".map-choice").value = which;
    this.$(".view").value = view;
    this.map.view = view;
    this.map.fit();
    legend(this.$(".legend"), view, this.map.data);
    this.draw();
  }

  // Images

  async encoded(image) {
    const answer = await api("encode", { run: this.number, ...image.request });
    const score = `${answer.psnr === null ? "∞" : answer.psnr.toFixed(1)} dB, SSIM ${answer.ssim.toFixed(3)}`;
    return { image, first: answer.tokens, base: answer.tokens, original: answer.original, score, second: null };
  }

  async useSecond(image) {
    const second = await this.encoded(image);
    this.setWork({ ...this.work, second });
  }

  // Show `work`; its picture follows when `update` is done.
  setWork(work) {
    this.work = work;
    this.corner = null;
    this.$(".pictures .original").src = work.original;
    if (work.second) {
      this.$(".other .original").src = work.second.original;
      this.updateSecond();
    }
    this.showSecond();
    return this.update();
  }

  // The row for the second image is there as soon as one may be chosen, so that nothing moves later.
  showSecond() {
    const second = this.work?.second;
    this.$(".other").hidden = !second && this.shared.tool !== "swap";
    if (!second) this.element.querySelectorAll(".other img").forEach((image) => image.removeAttribute("src"));
  }

  offsets(shift) {
    return this.info.maps.map((map, number) => {
      const [dx, dy] = shift[number] ?? [0, 0];
      const axes = map.grid.shape.length;
      return axes === 1 ? [dx] : [...Array(axes - 2).fill(0), dy, dx];
    });
  }

  async decode() {
    if (!this.work) return;
    const { work } = this;
    const { shift } = this.shared;
    const answer = await api("shift", { run: this.number, tokens: work.base, offsets: this.offsets(shift) });
    this.shown = answer.tokens;
    this.$(".pictures .decoded").src = answer.image;
    const mine = shift.slice(0, this.info.maps.length);
    const moves = [...new Set(mine.map(([x, y]) => `(${y}, ${x})`))].join(" and ");
    if (mine.some((each) => each.some(Boolean))) this.$(".score").textContent = `tokens moved by ${moves} (rows, columns)`;
    else this.$(".score").textContent = work.base === work.first ? `decoded, ${work.score}` : "decoded after your edits";
    this.draw();
  }

  async decodeSecond() {
    const { second } = this.work ?? {};
    if (second) this.$(".other .decoded").src = (await api("decode", { run: this.number, tokens: second.base })).image;
  }

  // Edits (see edits.js). A region is [top, left, bottom, right] as shares of the image.

  // What moved tokens show becomes what they are, so that an edit is made to what is seen.
  settle() {
    this.work = { ...this.work, base: this.shown };
  }

  async move(shift) {
    const { tokens } = await api("shift", { run: this.number, tokens: this.work.base, offsets: this.offsets(shift) });
    this.setBase(tokens);
  }

  fill(region, which, code) {
    const base = copy(this.work.base);
    within(region, base[which], (row, column) => (base[which][row][column] = code));
    this.setBase(base);
  }

  // The same region on every level, so that a VQ-VAE-2 exchanges all of it.
  exchange(region) {
    const [base, theirs] = [copy(this.work.base), copy(this.work.second.base)];
    base.forEach((plane, number) =>
      within(region, plane, (row, column) => {
        [plane[row][column], theirs[number][row][column]] = [theirs[number][row][column], plane[row][column]];
      }),
    );
    this.work = { ...this.work, second: { ...this.work.second, base: theirs } };
    this.setBase(base);
    this.updateSecond();
  }

  setBase(base) {
    this.work = { ...this.work, base };
    this.shown = base;
    this.draw();
    this.update();
  }

  // Drawing

  draw() {
    if (!this.map) return;
    const [lit, accent] = [color("--lit"), color("--accent")];
    const marks = Object.values(this.ends).map((code) => ({ code, color: accent }));
    if (this.picked !== null) marks.push({ code: this.picked, color: accent });
    if (this.code !== null) marks.push({ code: this.code, color: lit });
    this.map.draw(marks, this.path, accent);
    if (this.shown) this.drawMosaic(lit);
  }

  drawMosaic(lit) {
    const canvas = this.$(".mosaic");
    const plane = this.shown[this.which];
    const [height, width] = [plane.length, plane[0].length];
    const cell = Math.max(4, Math.floor(512 / Math.max(height, width)));
    if (canvas.width !== width * cell) canvas.width = width * cell;
    if (canvas.height !== height * cell) canvas.height = height * cell;
    const unit = canvas.width / (canvas.clientWidth || canvas.width);
    const context = canvas.getContext("2d");
    plane.forEach((row, y) =>
      row.forEach((code, x) => {
        context.fillStyle = this.map.colors[code];
        context.fillRect(x * cell, y * cell, cell, cell);
      }),
    );
    const frame = (x, y, w, h, stroke) => {
      context.beginPath();
      context.rect(x * cell, y * cell, w * cell, h * cell);
      strokeOnAny(context, stroke, Math.min(unit, cell / 10));
    };
    let same = 0;
    plane.forEach((row, y) =>
      row.forEach((code, x) => {
        if (code !== this.code) return;
        same += 1;
        frame(x, y, 1, 1, lit);
      }),
    );
    canvas.dataset.lit = same;
    canvas.dataset.size = `${height} x ${width}`;
    if (this.cursor) {
      const [row, column] = this.cursor;
      const [row0, column0] = this.corner ?? this.cursor;
      frame(Math.min(column, column0), Math.min(row, row0), Math.abs(column - column0) + 1, Math.abs(row - row0) + 1, "#fff");
    }
  }

  // Point at a code, and at a token where that is how; the other runs point at their token there.
  point(code, token = null, alone = false) {
    this.code = code;
    this.cursor = token;
    if (code !== null) this.tell(code, token);
    this.draw();
    if (alone) return;
    for (const panel of this.shared.panels) if (panel !== this) panel.follow(this, token);
  }

  // The code below the cursor may be another one now.
  pointAgain() {
    if (this.cursor) this.point(this.shown[this.which][this.cursor[0]][this.cursor[1]], this.cursor, true);
  }

  // Point at the token that another run's token lies in.
  follow(other, token) {
    if (!token || !this.shown) return this.rest();
    const [plane, theirs] = [this.shown[this.which], other.shown[other.which]];
    const scaled = (place, from, to) => Math.floor((place * to) / from);
    const mine = [scaled(token[0], theirs.length, plane.length), scaled(token[1], theirs[0].length, plane[0].length)];
    this.point(plane[mine[0]][mine[1]], mine, true);
  }

  tell(code, token) {
    const { data } = this.map;
    const { shape } = data.map.grid;
    const coords = [];
    for (let axis = shape.length - 1, rest = code; axis >= 0; axis--) {
      coords.unshift(rest % shape[axis]);
      rest = Math.floor(rest / shape[axis]);
    }
    const uses = this.shown ? this.shown[this.which].flat().filter((each) => each === code).length : 0;
    const where = this.shared.panels.length > 1 ? `${this.info.name}: code` : "Code";
    this.readout.querySelector("p").textContent =
      `${where} ${code} at (${coords.join(", ")}): used ${data.hits[code].toLocaleString("en")} times in ${data.images} validation images, ` +
      `${uses} here; distance to neighbors ${data.distances[code].toPrecision(3)}.`;
    this.$(".token").textContent = token ? `(${token.join(", ")}): code ${code}` : "tokens in map colors";
    const canvas = this.readout.querySelector("canvas");
    const context = canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    this.map.drawTile(context, code, 0, 0, canvas.width, canvas.height);
    canvas.dataset.code = code;
  }

  rest() {
    this.code = null;
    if (!this.corner) this.cursor = null;
    this.draw();
  }

  zoom(factor) {
    this.map.zoomBy(factor || 1e-9);
    this.draw();
  }

  pick(code) {
    if (code === null) return;
    this.picked = code;
    const others = this.shared.panels.filter((panel) => panel !== this && panel.map);
    for (const panel of others) {
      panel.picked = panel.map.mostLike(this.map.looks[code]);
      panel.draw();
    }
    const theirs = others.map((panel) => `; in ${panel.info.name} code ${panel.picked} looks most like it`);
    say(`code ${code} is picked${theirs.join("")}`);
    this.point(code, this.cursor);
    this.shared.changed();
  }

  // Paths

  clearPath() {
    Object.assign(this, { ends: {}, path: [] });
    this.$(".strip").hidden = this.$(".clear").hidden = true;
    this.draw();
  }

  async setEnd(end) {
    if (this.picked === null) {
      say("Pick a code on the map first: click it, or press Enter on it.", true);
      return;
    }
    this.ends[end] = this.picked;
    this.$(".clear").hidden = false;
    this.draw();
    const { start, end: last } = this.ends;
    if (start === undefined || last === undefined) {
      say(`the path ${end}s at code ${this.picked}; pick another code for its ${end === "start" ? "end" : "start"}`);
      return;
    }
    const { codes, image } = await api(`path?run=${this.number}&map=${this.which}&start=${start}&end=${last}`);
    this.path = codes;
    this.draw();
    const strip = this.$(".strip");
    strip.hidden = false;
    strip.querySelector("p").textContent = `from code ${start} to code ${last}: ${codes.length} ${codes.length === 1 ? "code" : "codes"} on the way`;
    const stops = codes.map((code, i) => {
      const stop = document.createElement("li");
      stop.textContent = `code ${code}`;
      stop.style.backgroundImage = `url(${image})`;
      stop.style.backgroundSize = `${codes.length * 100}% 100%`;
      stop.style.backgroundPosition = `${codes.length > 1 ? (100 * i) / (codes.length - 1) : 0}% 0`;
      stop.addEventListener("pointerenter", () => this.point(code));
      stop.addEventListener("pointerleave", () => this.rest());
      return stop;
    });
    strip.querySelector("ol").replaceChildren(...stops);
  }

  listen() {
    const on = (selector, kind, work) =>
      this.$(selector).addEventListener(kind, () => Promise.resolve(work()).catch((error) => say(error.message, true)));
    on(".in", "click", () => this.zoom(1.5));
    on(".out", "click", () => this.zoom(1 / 1.5));
    on(".whole", "click", () => this.zoom(0));
    const show = () => this.shared.showMaps(Number(this.$(".map-choice").value), this.$(".view").value);
    on(".view", "change", show);
    on(".map-choice", "change", show);
    on(".start", "click", () => this.setEnd("start"));
    on(".end", "click", () => this.setEnd("end"));
    on(".clear", "click", () => this.clearPath());
    const named = (ending) => `${this.info.name}-${this.work.image.label.replace(/\.\w+$/, "").replace(/[^\w]+/g, "-")}.${ending}`;
    on(".save-picture", "click", () => this.shown && save(this.$(".pictures .decoded").src, named("png")));
    on(".save-tokens", "click", () => this.shown && saveAnswer("tokens", { run: this.number, tokens: this.shown, name: this.work.image.label }, named("npz")));
    listenToMap(this);
    listenToMosaic(this);
  }
}
