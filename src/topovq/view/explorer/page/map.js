// A map on a canvas: its cells (squares or hexagons) in one of four views, zoom and pan, marks and a path.
import { placeColor, rampColor } from "./colors.js";

const ROW = Math.sqrt(3) / 2;
const SMALLEST_MARK = 14; // pixels of the page: a cell smaller than that is marked by a ring around it
const LOOK = 4; // parts of a tile's side by which it is compared

const greatest = (values, least) => values.reduce((a, b) => Math.max(a, b), least); // spread arguments would be too many

// Black, white and the color: one of them stands out from any tile. `unit` is a pixel of the page.
export function strokeOnAny(context, color, unit) {
  for (const [stroke, wide] of [["#000", 5.5], ["#fff", 3.5], [color, 1.8]]) {
    context.lineWidth = wide * unit;
    context.strokeStyle = stroke;
    context.stroke();
  }
}

export class MapCanvas {
  constructor(canvas, data, sheet) {
    Object.assign(this, { canvas, data, sheet, view: "codes", zoom: 1, left: 0, top: 0 });
    this.hexagonal = data.map.grid.topology === "hexagonal";
    const { places } = data;
    this.width = 1 + greatest(places.map((place) => place[0]), 0);
    this.height = greatest(places.map((place) => place[1]), 0) + (this.hexagonal ? 1 / ROW : 1);
    this.colors = places.map(([x, y]) => placeColor(this.width > 1 ? x / (this.width - 1) : 0.5, this.height > 1 ? Math.min(1, y / (this.height - 1)) : 0.5));
  }

  // Everything the views show is painted once, then scaled: a map may have tens of thousands of codes.
  painted() {
    if (this.paintedView === this.view) return this.layer;
    const cell = Math.max(4, Math.min(this.hexagonal ? 40 : 16, Math.floor(3000 / Math.max(this.width, this.height))));
    const layer = document.createElement("canvas");
    layer.width = Math.ceil(this.width * cell);
    layer.height = Math.ceil(this.height * cell);
    const context = layer.getContext("2d");
    context.imageSmoothingEnabled = false;
    const { hits, distances, places } = this.data;
    const most = { hits: Math.log1p(greatest(hits ?? [], 1)), distances: greatest(distances, 1e-12) };
    places.forEach(([x, y], code) => {
      context.save();
      if (this.hexagonal) {
        this.outline(context, x, y, cell);
        context.clip();
      }
      if (this.view === "codes") this.drawTile(context, code, x * cell, y * cell, cell, this.hexagonal ? cell / ROW : cell);
      else {
        const share = this.view === "hits" ? Math.log1p(hits[code]) / most.hits : distances[code] / most.distances;
        context.fillStyle = this.view === "colors" ? this.colors[code] : rampColor(this.view, share);
        context.fillRect(x * cell, y * cell, cell + (this.hexagonal ? 0 : 0.5), cell / ROW);
      }
      context.restore();
    });
    this.paintedView = this.view;
    this.layer = layer;
    return layer;
  }

  drawTile(context, code, x, y, width, height) {
    const { columns, side } = this.data.sheet;
    context.drawImage(this.sheet, (code % columns) * side, Math.floor(code / columns) * side, side, side, x, y, width, height);
  }

  outline(context, x, y, cell) {
    context.beginPath();
    if (!this.hexagonal) {
      context.rect(x * cell, y * cell, cell, cell);
      return;
    }
    const tall = cell / ROW;
    const corners = [[0.5, 0], [1, 0.25], [1, 0.75], [0.5, 1], [0, 0.75], [0, 0.25]];
    corners.forEach(([u, v], i) => context[i ? "lineTo" : "moveTo"](x * cell + u * cell, y * cell + v * tall));
    context.closePath();
  }

  // The middle of a code's cell, in cells.
  middle(code) {
    const [x, y] = this.data.places[code];
    return [x + 0.5, y + (this.hexagonal ? 0.5 / ROW : 0.5)];
  }

  // Give the canvas the map's proportions; a long map is shown with room beside it.
  fit() {
    const tall = Math.max(0.1, Math.min(1.25, this.height / this.width));
    this.canvas.width = 1200;
    this.canvas.height = Math.round(1200 * tall);
    this.canvas.style.setProperty("--tall", tall);
  }

  get scale() {
    return Math.min(this.canvas.width / this.width, this.canvas.height / this.height) * this.zoom;
  }

  // Width and height of what is seen, in cells.
  get seen() {
    return [this.canvas.width / this.scale, this.canvas.height / this.scale];
  }

  // `marks` are codes with a color, `path` is a list of codes to be joined by a line.
  draw(marks = [], path = [], color = "#fff") {
    const context = this.canvas.getContext("2d");
    const unit = this.canvas.width / (this.canvas.clientWidth || this.canvas.width);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.imageSmoothingEnabled = false;
    const { scale } = this;
    const [x0, y0] = [-this.left * scale, -this.top * scale];
    context.drawImage(this.painted(), x0, y0, this.width * scale, this.height * scale);
    context.translate(x0, y0);
    this.drawPath(context, path, color, scale, unit);
    for (const mark of marks) {
      if (scale < SMALLEST_MARK * unit) {
        const [x, y] = this.middle(mark.code);
        context.beginPath();
        context.arc(x * scale, y * scale, (SMALLEST_MARK * unit) / 2, 0, 2 * Math.PI);
      } else this.outline(context, ...this.data.places[mark.code], scale);
      strokeOnAny(context, mark.color, unit);
    }
  }

  drawPath(context, path, color, scale, unit) {
    if (path.length < 2) return;
    context.beginPath();
    context.lineJoin = context.lineCap = "round";
    path.forEach((code, i) => {
      const [x, y] = this.middle(code);
      const [px, py] = i ? this.middle(path[i - 1]) : [x, y];
      // Over a border that wraps the line goes on at the other side.
      const joined = i && Math.abs(x - px) < this.width / 2 && Math.abs(y - py) < Math.max(2, this.height / 2);
      context[joined ? "lineTo" : "moveTo"](x * scale, y * scale);
    });
    strokeOnAny(context, color, unit);
  }

  // The code at a place of the page, or null.
  codeAt(clientX, clientY) {
    const box = this.canvas.getBoundingClientRect();
    const x = ((clientX - box.left) / box.width) * this.seen[0] + this.left;
    const y = ((clientY - box.top) / box.height) * this.seen[1] + this.top;
    const tall = this.hexagonal ? 1 / ROW : 1;
    return this.nearest((px, py) => (Math.abs(px - x) <= 0.5 && Math.abs(py - y) <= tall / 2 ? Math.hypot(px - x, py - y) : null));
  }

  // From a code one step in a direction: the closest code that lies there, or the same one at the border.
  neighbor(code, dx, dy) {
    const [x, y] = this.middle(code);
    const found = this.nearest((px, py) => {
      const along = (px - x) * dx + (py - y) * dy;
      const aside = Math.abs((px - x) * dy) + Math.abs((py - y) * dx);
      return along > 0.3 && aside < 0.75 ? along + aside * 1.01 : null;
    });
    return found ?? code;
  }

  nearest(distance) {
    let best = null;
    let least = Infinity;
    this.data.places.forEach((_, code) => {
      const far = distance(...this.middle(code));
      if (far !== null && far < least) [best, least] = [code, far];
    });
    return best;
  }

  // What each code looks like: the mean colors of 4 x 4 parts of its tile.
  get looks() {
    if (this.lookedAt) return this.lookedAt;
    const { columns, side } = this.data.sheet;
    const whole = document.createElement("canvas");
    [whole.width, whole.height] = [this.sheet.naturalWidth, this.sheet.naturalHeight];
    const context = whole.getContext("2d");
    context.drawImage(this.sheet, 0, 0);
    const { data } = context.getImageData(0, 0, whole.width, whole.height);
    const ends = Array.from({ length: LOOK }, (_, part) => [Math.floor((part * side) / LOOK), Math.ceil(((part + 1) * side) / LOOK)]);
    this.lookedAt = this.data.places.map((_, code) => {
      const [left, top] = [(code % columns) * side, Math.floor(code / columns) * side];
      const look = [];
      for (const [y0, y1] of ends)
        for (const [x0, x1] of ends) {
          const sum = [0, 0, 0];
          for (let y = y0; y < y1; y++)
            for (let x = x0; x < x1; x++) for (let c = 0; c < 3; c++) sum[c] += data[4 * ((top + y) * whole.width + left + x) + c];
          look.push(...sum.map((value) => value / (y1 - y0) / (x1 - x0)));
        }
      return look;
    });
    return this.lookedAt;
  }

  // The code of this map that looks most like one of another run's map.
  mostLike(look) {
    let best = 0;
    let least = Infinity;
    this.looks.forEach((ours, code) => {
      let far = 0;
      for (let i = 0; i < look.length; i++) far += (ours[i] - look[i]) ** 2;
      if (far < least) [best, least] = [code, far];
    });
    return best;
  }

  zoomBy(factor, clientX, clientY) {
    const box = this.canvas.getBoundingClientRect();
    const u = clientX === undefined ? 0.5 : (clientX - box.left) / box.width;
    const v = clientY === undefined ? 0.5 : (clientY - box.top) / box.height;
    const before = this.seen;
    this.zoom = Math.max(1, Math.min(Math.max(this.width, this.height) / 3, this.zoom * factor));
    const after = this.seen;
    this.left += (before[0] - after[0]) * u;
    this.top += (before[1] - after[1]) * v;
    this.panBy(0, 0);
    this.canvas.classList.toggle("zoomed", this.zoom > 1);
  }

  panBy(dx, dy) {
    const box = this.canvas.getBoundingClientRect();
    const [wide, high] = this.seen;
    this.left = Math.max(0, Math.min(this.width - wide, this.left - (dx / box.width) * wide));
    this.top = Math.max(0, Math.min(this.height - high, this.top - (dy / box.height) * high));
  }

  see(code) {
    const [wide, high] = this.seen;
    const [x, y] = this.data.places[code];
    this.left = Math.min(Math.max(this.left, x + 1 - wide), x);
    this.top = Math.min(Math.max(this.top, y + 1 / ROW - high), y);
    this.panBy(0, 0);
  }
}
