// One run on the page: its map, an image, the mosaic of its tokens, and what the tools do to them.
import { MapCanvas } from "./map.js";
import { api, latest, say } from "./api.js";

const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const copy = (planes) => planes.map((rows) => rows.map((row) => [...row]));

export class RunPanel {
  constructor(info, number, shared) {
    Object.assign(this, { info, number, shared, which: 0, maps: new Map() });
    Object.assign(this, { base: null, shown: null, first: null, second: null });
    Object.assign(this, { code: null, picked: null, cursor: null, corner: null, dragged: null, ends: {} });
    this.element = document.getElementById("run").content.firstElementChild.cloneNode(true);
    this.element.dataset.run = number;
    this.$ = (selector) => this.element.querySelector(selector);
    this.$("h2").textContent = info.name;
    const sizes = info.maps.map((map) => `${map.grid.shape.join(" x ")} ${map.grid.topology}`);
    const learned = info.loss === null ? "" : `, validation loss ${info.loss.toFixed(4)}, ${Math.round(info.usage * 100)}% of codes in use`;
    this.$(".facts").textContent = `${info.model}, ${info.quantizer}, ${[...new Set(sizes)].join(" and ")}${learned}`;
    info.maps.forEach((map, each) => this.$(".map-choice").append(new Option(map.name, each)));
    this.$(".which").hidden = info.maps.length === 1;
    this.update = latest(() => this.decode());
    this.listen();
  }

  get map() {
    return this.maps.get(this.which);
  }

  async loadMap(which = this.which) {
    if (!this.maps.has(which)) {
      const data = await api(`map?run=${this.number}&map=${which}`);
      const sheet = new Image();
      sheet.src = data.sheet.image;
      await sheet.decode();
      this.maps.set(which, new MapCanvas(this.$(".map"), data, sheet));
    }
    if (which !== this.which) Object.assign(this, { which, code: null, picked: null, cursor: null, corner: null, ends: {} });
    this.map.view = this.$(".view").value;
    this.map.fit();
    this.draw();
  }

  async useImage(image) {
    const answer = await api("encode", { run: this.number, ...image });
    this.first = answer.tokens;
    this.base = copy(answer.tokens);
    this.$(".original").src = answer.original;
    this.score = `${answer.psnr === null ? "∞" : answer.psnr.toFixed(1)} dB, SSIM ${answer.ssim.toFixed(3)}`;
    this.corner = null;
    await this.decode();
  }

  async useSecond(image) {
    const answer = await api("encode", { run: this.number, ...image });
    const other = this.$(".other");
    other.hidden = false;
    other.querySelector(".original").src = answer.original;
    other.querySelector(".decoded").src = answer.reconstruction;
    this.second = { first: answer.tokens, tokens: copy(answer.tokens) };
  }

  undo() {
    if (!this.first) return;
    this.base = copy(this.first);
    if (this.second) {
      this.second.tokens = copy(this.second.first);
      this.decodeSecond();
    }
    this.update();
  }

  async decode() {
    if (!this.base) return;
    const offsets = this.info.maps.map((map, number) => {
      const [dx, dy] = this.shared.shift[number];
      const axes = map.grid.shape.length;
      return axes === 1 ? [dx] : [...Array(axes - 2).fill(0), dy, dx];
    });
    const moved = offsets.some((offset) => offset.some(Boolean));
    const answer = await api("shift", { run: this.number, tokens: this.base, offsets });
    this.shown = answer.tokens;
    this.$(".pictures .decoded").src = answer.image;
    const edited = JSON.stringify(this.base) !== JSON.stringify(this.first);
    this.$(".score").textContent = moved ? `tokens moved by ${this.shared.shift.map(([x, y]) => `(${x}, ${y})`).slice(0, offsets.length).join(", ")}` : edited ? "decoded after your edits" : `decoded, ${this.score}`;
    this.draw();
  }

  async decodeSecond() {
    const answer = await api("decode", { run: this.number, tokens: this.second.tokens });
    this.$(".other .decoded").src = answer.image;
  }

  // What moved tokens show becomes what they are, so that an edit is made to what is seen.
  edit(change) {
    this.base = copy(this.shown);
    change(this.base[this.which]);
    this.shown = copy(this.base);
    if (this.shared.shift.some((shift) => shift.some(Boolean))) {
      this.shared.resetShift();
      this.shared.panels.forEach((panel) => panel !== this && panel.update());
    }
    this.draw();
    this.update();
  }

  paint(row, column) {
    if (this.picked === null) {
      say("Pick a code on the map first: click it, or press Enter on it.", true);
      return;
    }
    if (this.shown[this.which][row][column] !== this.picked) this.edit((plane) => (plane[row][column] = this.picked));
  }

  swap(a, b) {
    if (!this.second) {
      say("Choose the second image first.", true);
      return;
    }
    const [top, bottom] = [Math.min(a[0], b[0]), Math.max(a[0], b[0])];
    const [left, right] = [Math.min(a[1], b[1]), Math.max(a[1], b[1])];
    // The same region on every level, so that a VQ-VAE-2 exchanges all of it.
    const { height, width } = this.info.maps[this.which];
    this.edit(() => {
      this.base.forEach((plane, number) => {
        const [v, u] = [plane.length / height, plane[0].length / width];
        for (let row = Math.floor(top * v); row < Math.ceil((bottom + 1) * v); row++)
          for (let column = Math.floor(left * u); column < Math.ceil((right + 1) * u); column++) {
            const theirs = this.second.tokens[number][row];
            [plane[row][column], theirs[column]] = [theirs[column], plane[row][column]];
          }
      });
    });
    this.decodeSecond().catch((error) => say(error.message, true));
    say(`exchanged ${bottom - top + 1} x ${right - left + 1} tokens with the second image`);
  }

  // Drawing

  draw() {
    if (!this.map) return;
    const lit = getComputedStyle(document.documentElement).getPropertyValue("--lit").trim();
    const accent = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
    const marks = [{ codes: Object.values(this.ends), color: accent, wide: 2 }];
    if (this.picked !== null) marks.push({ codes: [this.picked], color: accent, wide: 3 });
    if (this.code !== null) marks.push({ codes: [this.code], color: lit, wide: 3 });
    this.map.draw(marks);
    if (this.shown) this.drawMosaic(lit);
  }

  drawMosaic(lit) {
    const canvas = this.$(".mosaic");
    const plane = this.shown[this.which];
    const [height, width] = [plane.length, plane[0].length];
    const cell = Math.max(4, Math.floor(512 / Math.max(height, width)));
    if (canvas.width !== width * cell) canvas.width = width * cell;
    if (canvas.height !== height * cell) canvas.height = height * cell;
    const context = canvas.getContext("2d");
    plane.forEach((row, y) =>
      row.forEach((code, x) => {
        context.fillStyle = this.map.colors[code];
        context.fillRect(x * cell, y * cell, cell, cell);
      }),
    );
    const frame = (x, y, w, h, color) => {
      context.strokeStyle = "#000c";
      context.lineWidth = 6;
      context.strokeRect(x * cell + 3, y * cell + 3, w * cell - 6, h * cell - 6);
      context.strokeStyle = color;
      context.lineWidth = 3;
      context.strokeRect(x * cell + 3, y * cell + 3, w * cell - 6, h * cell - 6);
    };
    let same = 0;
    plane.forEach((row, y) =>
      row.forEach((code, x) => {
        if (code === this.code) {
          same += 1;
          frame(x, y, 1, 1, lit);
        }
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

  point(code, token) {
    this.code = code;
    this.cursor = token ?? null;
    if (code !== null) {
      const { data } = this.map;
      const shape = data.map.grid.shape;
      const coords = [];
      for (let axis = shape.length - 1, rest = code; axis >= 0; axis--) {
        coords.unshift(rest % shape[axis]);
        rest = Math.floor(rest / shape[axis]);
      }
      const uses = this.shown ? this.shown[this.which].flat().filter((each) => each === code).length : 0;
      this.$(".readout").textContent =
        `Code ${code} at (${coords.join(", ")}): used ${data.hits[code].toLocaleString("en")} times in ${data.images} validation images, ` +
        `${uses} here; distance to neighbors ${data.distances[code].toPrecision(3)}.`;
      this.$(".token").textContent = token ? `token at row ${token[0]}, column ${token[1]}: code ${code}` : "tokens in map colors";
    }
    this.draw();
  }

  // Events

  listen() {
    const map = this.$(".map");
    let pan = null;
    map.addEventListener("pointerdown", (event) => (pan = { x: event.clientX, y: event.clientY, moved: false }));
    map.addEventListener("pointermove", (event) => {
      if (!this.map) return;
      if (pan && event.buttons) {
        const [dx, dy] = [event.clientX - pan.x, event.clientY - pan.y];
        if (pan.moved || Math.hypot(dx, dy) > 5) {
          map.setPointerCapture(event.pointerId);
          this.map.panBy(dx, dy);
          pan = { x: event.clientX, y: event.clientY, moved: true };
          this.draw();
        }
        return;
      }
      const code = this.map.codeAt(event.clientX, event.clientY);
      if (code !== null && code !== this.code) this.point(code);
    });
    map.addEventListener("pointerup", (event) => {
      if (pan && !pan.moved && this.map) this.pick(this.map.codeAt(event.clientX, event.clientY));
      pan = null;
    });
    map.addEventListener("pointerleave", () => this.rest());
    map.addEventListener(
      "wheel",
      (event) => {
        if (!this.map) return;
        event.preventDefault();
        this.map.zoomBy(event.deltaY < 0 ? 1.2 : 1 / 1.2, event.clientX, event.clientY);
        this.draw();
      },
      { passive: false },
    );
    map.addEventListener("keydown", (event) => {
      if (!this.map) return;
      const move = KEYS[event.key];
      if (move) {
        const from = this.code ?? this.picked ?? 0;
        const next = this.code === null ? from : this.map.neighbor(from, ...move);
        this.map.see(next);
        this.point(next);
      } else if (event.key === "Enter" || event.key === " ") this.pick(this.code);
      else if (event.key === "+" || event.key === "=") this.zoom(1.5);
      else if (event.key === "-") this.zoom(1 / 1.5);
      else if (event.key === "0") this.zoom(0);
      else return;
      event.preventDefault();
    });
    this.$(".in").addEventListener("click", () => this.zoom(1.5));
    this.$(".out").addEventListener("click", () => this.zoom(1 / 1.5));
    this.$(".whole").addEventListener("click", () => this.zoom(0));
    this.$(".view").addEventListener("change", () => this.loadMap());
    this.$(".map-choice").addEventListener("change", () => {
      this.loadMap(Number(this.$(".map-choice").value)).catch((error) => say(error.message, true));
    });
    for (const end of ["start", "end"]) this.$(`.${end}`).addEventListener("click", () => this.setEnd(end));
    this.listenToMosaic(this.$(".mosaic"));
  }

  listenToMosaic(mosaic) {
    const at = (event) => {
      const box = mosaic.getBoundingClientRect();
      const plane = this.shown[this.which];
      const inside = (share, size) => Math.max(0, Math.min(size - 1, Math.floor(share * size)));
      return [inside((event.clientY - box.top) / box.height, plane.length), inside((event.clientX - box.left) / box.width, plane[0].length)];
    };
    const go = (token) => this.point(this.shown[this.which][token[0]][token[1]], token);
    mosaic.addEventListener("pointerdown", (event) => {
      if (!this.shown) return;
      mosaic.setPointerCapture(event.pointerId);
      const token = at(event);
      if (this.shared.tool === "paint") this.paint(...token);
      if (this.shared.tool === "swap") this.corner = token;
      if (this.shared.tool === "look") this.pick(this.shown[this.which][token[0]][token[1]]);
      go(token);
    });
    mosaic.addEventListener("pointermove", (event) => {
      if (!this.shown) return;
      const token = at(event);
      if (event.buttons && this.shared.tool === "paint") this.paint(...token);
      if (!this.cursor || String(token) !== String(this.cursor)) go(token);
    });
    mosaic.addEventListener("pointerup", (event) => {
      if (!this.shown || this.shared.tool !== "swap" || !this.corner) return;
      const corner = this.corner;
      this.corner = null;
      this.swap(corner, at(event));
    });
    mosaic.addEventListener("pointerleave", (event) => event.buttons || this.rest());
    mosaic.addEventListener("keydown", (event) => {
      if (!this.shown) return;
      const plane = this.shown[this.which];
      const [row, column] = this.cursor ?? [0, 0];
      const move = KEYS[event.key];
      if (move) {
        go([Math.max(0, Math.min(plane.length - 1, row + move[1])), Math.max(0, Math.min(plane[0].length - 1, column + move[0]))]);
      } else if (event.key === "Enter" || event.key === " ") {
        if (this.shared.tool === "paint") this.paint(row, column);
        else if (this.shared.tool === "look") this.pick(plane[row][column]);
        else if (this.corner) {
          const corner = this.corner;
          this.corner = null;
          this.swap(corner, [row, column]);
        } else this.corner = [row, column];
        go([row, column]);
      } else if (event.key === "Escape") {
        this.corner = null;
        this.rest();
      } else return;
      event.preventDefault();
    });
  }

  rest() {
    this.code = null;
    if (!this.corner) this.cursor = null;
    this.draw();
  }

  zoom(factor) {
    if (factor) this.map.zoomBy(factor);
    else this.map.zoomBy(1e-9);
    this.draw();
  }

  pick(code) {
    if (code === null) return;
    this.picked = code;
    say(`code ${code} is picked`);
    this.point(code, this.cursor);
  }

  async setEnd(end) {
    if (this.picked === null) {
      say("Pick a code on the map first: click it, or press Enter on it.", true);
      return;
    }
    this.ends[end] = this.picked;
    this.draw();
    if (this.ends.start === undefined || this.ends.end === undefined) {
      say(`the path ${end}s at code ${this.picked}; pick another code for its ${end === "start" ? "end" : "start"}`);
      return;
    }
    try {
      const { start, end: last } = this.ends;
      const path = await api(`path?run=${this.number}&map=${this.which}&start=${start}&end=${last}`);
      const strip = this.$(".strip");
      strip.hidden = false;
      strip.querySelector("img").src = path.image;
      strip.querySelector("img").alt = `The codes ${path.codes.join(", ")} decoded`;
      strip.querySelector("figcaption").textContent = `from code ${start} to code ${last}: ${path.codes.length} ${path.codes.length === 1 ? "code" : "codes"} on the way`;
    } catch (error) {
      say(error.message, true);
    }
  }
}
