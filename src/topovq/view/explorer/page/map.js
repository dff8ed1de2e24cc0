// A map on a canvas: its cells (squares or hexagons) in one of four views, zoom and pan, and outlines of some codes.

const ROW = Math.sqrt(3) / 2;
const CORNERS = [[228, 87, 46], [243, 198, 35], [106, 63, 181], [23, 184, 144]]; // of the map, as colors: top left ...
const RAMPS = {
  hits: [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]],
  distances: [[0, 0, 4], [81, 18, 124], [183, 55, 121], [252, 137, 97], [252, 253, 191]],
};

const greatest = (values, least) => values.reduce((a, b) => Math.max(a, b), least); // spread arguments would be too many
const mix = (a, b, share) => a.map((value, i) => value + (b[i] - value) * share);
const css = (color) => `rgb(${color.map(Math.round).join(" ")})`;

function ramp(stops, share) {
  const at = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  return css(mix(stops[low], stops[low + 1], at - low));
}

export class MapCanvas {
  constructor(canvas, data, sheet) {
    Object.assign(this, { canvas, data, sheet, view: "codes", zoom: 1, left: 0, top: 0 });
    this.hexagonal = data.map.grid.topology === "hexagonal";
    const { places } = data;
    this.width = 1 + greatest(places.map((place) => place[0]), 0);
    this.height = greatest(places.map((place) => place[1]), 0) + (this.hexagonal ? 1 / ROW : 1);
    this.colors = places.map(([x, y]) => {
      const u = this.width > 1 ? x / (this.width - 1) : 0.5;
      const v = this.height > 1 ? Math.min(1, y / (this.height - 1)) : 0.5;
      return css(mix(mix(CORNERS[0], CORNERS[1], u), mix(CORNERS[2], CORNERS[3], u), v));
    });
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
    const { hits, distances, places, sheet } = this.data;
    const most = { hits: Math.log1p(greatest(hits, 1)), distances: greatest(distances, 1e-12) };
    places.forEach(([x, y], code) => {
      context.save();
      if (this.hexagonal) {
        this.outline(context, x, y, cell);
        context.clip();
      }
      if (this.view === "codes") {
        const [sx, sy] = [(code % sheet.columns) * sheet.side, Math.floor(code / sheet.columns) * sheet.side];
        const tall = this.hexagonal ? cell / ROW : cell;
        context.drawImage(this.sheet, sx, sy, sheet.side, sheet.side, x * cell, y * cell, cell, tall);
      } else {
        const share = this.view === "hits" ? Math.log1p(hits[code]) / most.hits : distances[code] / most.distances;
        context.fillStyle = this.view === "colors" ? this.colors[code] : ramp(RAMPS[this.view], share);
        context.fillRect(x * cell, y * cell, cell + (this.hexagonal ? 0 : 0.5), cell / ROW);
      }
      context.restore();
    });
    this.paintedView = this.view;
    this.layer = layer;
    return layer;
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

  // Give the canvas the map's proportions; a long map is shown with room beside it.
  fit() {
    this.canvas.width = 800;
    this.canvas.height = Math.round(800 * Math.max(0.1, Math.min(1.25, this.height / this.width)));
  }

  get scale() {
    return Math.min(this.canvas.width / this.width, this.canvas.height / this.height) * this.zoom;
  }

  // Width and height of what is seen, in cells.
  get seen() {
    return [this.canvas.width / this.scale, this.canvas.height / this.scale];
  }

  draw(marks) {
    const context = this.canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.imageSmoothingEnabled = false;
    const { scale } = this;
    const [x0, y0] = [-this.left * scale, -this.top * scale];
    context.drawImage(this.painted(), x0, y0, this.width * scale, this.height * scale);
    context.translate(x0, y0);
    for (const { codes, color, wide } of marks) {
      for (const code of codes) {
        const [x, y] = this.data.places[code];
        this.outline(context, x, y, scale);
        context.lineWidth = wide + 3;
        context.strokeStyle = "#000a";
        context.stroke();
        context.lineWidth = wide;
        context.strokeStyle = color;
        context.stroke();
      }
    }
  }

  // The code at a place of the page, or null.
  codeAt(clientX, clientY) {
    const box = this.canvas.getBoundingClientRect();
    const x = ((clientX - box.left) / box.width) * this.seen[0] + this.left - 0.5;
    const tall = this.hexagonal ? 1 / ROW : 1;
    const y = ((clientY - box.top) / box.height) * this.seen[1] + this.top - tall / 2;
    return this.nearest((px, py) => (Math.abs(px - x) <= 0.5 && Math.abs(py - y) <= tall / 2 ? Math.hypot(px - x, py - y) : null));
  }

  // From a code one step in a direction: the closest code that lies there, or the same one at the border.
  neighbor(code, dx, dy) {
    const [x, y] = this.data.places[code];
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
    this.data.places.forEach(([x, y], code) => {
      const far = distance(x, y);
      if (far !== null && far < least) [best, least] = [code, far];
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
