// What mouse, fingers and keys do on a panel's map and on its mosaic.

const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const between = ([a, b]) => ({
  x: (a.clientX + b.clientX) / 2,
  y: (a.clientY + b.clientY) / 2,
  apart: Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY),
});

export function listenToMap(panel) {
  const canvas = panel.$(".map");
  let drag = null;
  let pinch = null;
  canvas.addEventListener("pointerdown", (event) => (drag = { x: event.clientX, y: event.clientY, moved: false }));
  canvas.addEventListener("pointermove", (event) => {
    if (!panel.map || pinch) return;
    if (drag && event.buttons && panel.map.zoom > 1) {
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      if (!drag.moved && Math.hypot(dx, dy) <= 5) return;
      canvas.setPointerCapture(event.pointerId);
      panel.map.panBy(dx, dy);
      drag = { x: event.clientX, y: event.clientY, moved: true };
      panel.draw();
      return;
    }
    const code = panel.map.codeAt(event.clientX, event.clientY);
    if (code !== null && code !== panel.code) panel.point(code);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (drag && !drag.moved && panel.map) panel.pick(panel.map.codeAt(event.clientX, event.clientY));
    drag = null;
  });
  canvas.addEventListener("pointercancel", () => (drag = null));
  canvas.addEventListener("pointerleave", () => panel.rest());

  const active = { passive: false }; // may keep the page from scrolling or zooming itself
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!panel.map || !(event.ctrlKey || event.metaKey)) return; // the page scrolls
      event.preventDefault();
      panel.map.zoomBy(Math.exp(-Math.max(-100, Math.min(100, event.deltaY)) / 500), event.clientX, event.clientY);
      panel.draw();
    },
    active,
  );
  canvas.addEventListener(
    "touchstart",
    (event) => {
      pinch = event.touches.length === 2 ? between(event.touches) : null;
      if (!pinch) return;
      if (event.cancelable) event.preventDefault();
      drag = null;
    },
    active,
  );
  canvas.addEventListener(
    "touchmove",
    (event) => {
      if (!pinch || event.touches.length !== 2 || !panel.map) return;
      if (event.cancelable) event.preventDefault();
      const now = between(event.touches);
      panel.map.zoomBy(now.apart / pinch.apart, now.x, now.y);
      panel.map.panBy(now.x - pinch.x, now.y - pinch.y);
      pinch = now;
      panel.draw();
    },
    active,
  );
  for (const kind of ["touchend", "touchcancel"]) canvas.addEventListener(kind, () => (pinch = null));

  canvas.addEventListener("keydown", (event) => {
    if (!panel.map || event.ctrlKey || event.metaKey) return;
    const move = KEYS[event.key];
    if (move) {
      const from = panel.code ?? panel.picked ?? 0;
      const next = panel.code === null ? from : panel.map.neighbor(from, ...move);
      panel.map.see(next);
      panel.point(next);
    } else if (event.key === "Enter" || event.key === " ") panel.pick(panel.code);
    else if (event.key === "+" || event.key === "=") panel.zoom(1.5);
    else if (event.key === "-") panel.zoom(1 / 1.5);
    else if (event.key === "0") panel.zoom(0);
    else return;
    event.preventDefault();
  });
}

export function listenToMosaic(panel) {
  const mosaic = panel.$(".mosaic");
  const { shared } = panel;
  let stroke = 0; // a number for each, by which undo takes it back as one
  const plane = () => panel.shown[panel.which];
  const at = (event) => {
    const box = mosaic.getBoundingClientRect();
    const inside = (share, size) => Math.max(0, Math.min(size - 1, Math.floor(share * size)));
    return [inside((event.clientY - box.top) / box.height, plane().length), inside((event.clientX - box.left) / box.width, plane()[0].length)];
  };
  const go = (token) => panel.point(plane()[token[0]][token[1]], token);
  const paint = (token) => shared.paint(panel, token, `stroke ${panel.number} ${stroke}`);
  const swap = (token) => {
    const { corner } = panel;
    panel.corner = null;
    shared.swap(panel, corner, token);
  };
  mosaic.addEventListener("pointerdown", (event) => {
    if (!panel.shown) return;
    mosaic.setPointerCapture(event.pointerId);
    const token = at(event);
    stroke += 1;
    if (shared.tool === "paint") paint(token);
    if (shared.tool === "swap") panel.corner = token;
    if (shared.tool === "look") panel.pick(plane()[token[0]][token[1]]);
    go(token);
  });
  mosaic.addEventListener("pointermove", (event) => {
    if (!panel.shown) return;
    const token = at(event);
    if (String(token) === String(panel.cursor)) return;
    if (event.buttons && shared.tool === "paint") paint(token);
    go(token);
  });
  mosaic.addEventListener("pointerup", (event) => panel.shown && shared.tool === "swap" && panel.corner && swap(at(event)));
  mosaic.addEventListener("pointerleave", (event) => {
    if (!event.buttons) shared.panels.forEach((each) => each.rest());
  });
  mosaic.addEventListener("keydown", (event) => {
    if (!panel.shown || event.ctrlKey || event.metaKey) return;
    const [row, column] = panel.cursor ?? [0, 0];
    const move = KEYS[event.key];
    const clamp = (value, size) => Math.max(0, Math.min(size - 1, value));
    if (move) go([clamp(row + move[1], plane().length), clamp(column + move[0], plane()[0].length)]);
    else if (event.key === "Enter" || event.key === " ") {
      stroke += 1;
      if (shared.tool === "paint") paint([row, column]);
      else if (shared.tool === "look") panel.pick(plane()[row][column]);
      else if (panel.corner) swap([row, column]);
      else panel.corner = [row, column];
      go([row, column]);
    } else if (event.key === "Escape") {
      panel.corner = null;
      panel.rest();
    } else return;
    event.preventDefault();
  });
}
