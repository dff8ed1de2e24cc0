// The pad and the numbers by which all tokens move.

const $ = (id) => document.getElementById(id);
const PAD = 6; // places from the middle of the pad to its edge
const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const within = (value, most) => Math.max(-most, Math.min(most, Math.round(value) || 0));

// `shared.shift` is [right, down] for each map; `about(gesture)` is called before it changes, `changed()` after.
export class ShiftPad {
  constructor(shared, about, changed) {
    Object.assign(this, { shared, about, changed, drags: 0 });
    const drag = (event) => {
      const box = $("pad").getBoundingClientRect();
      const along = (value, start, size) => within(((value - start) / size - 0.5) * (PAD / 0.45), PAD);
      this.set(along(event.clientX, box.left, box.width), along(event.clientY, box.top, box.height), `drag ${this.drags}`);
    };
    $("pad").addEventListener("pointerdown", (event) => {
      $("pad").setPointerCapture(event.pointerId);
      this.drags += 1;
      drag(event);
    });
    $("pad").addEventListener("pointermove", (event) => event.buttons && drag(event));
    $("pad").addEventListener("keydown", (event) => {
      const move = KEYS[event.key];
      const [dx, dy] = this.shared.shift[this.targets[0]];
      if (move) this.set(dx + move[0], dy + move[1]);
      else if (event.key === "Escape") this.reset();
      else return;
      event.preventDefault();
    });
    for (const id of ["dx", "dy"]) $(id).addEventListener("input", () => this.set($("dx").value, $("dy").value));
    $("target").addEventListener("change", () => this.show());
    $("reset").addEventListener("click", () => this.reset());
  }

  get targets() {
    return $("target").value === "all" ? this.shared.shift.map((_, number) => number) : [Number($("target").value)];
  }

  set(dx, dy, gesture = null) {
    const next = [within(dx, 99), within(dy, 99)];
    const { shift } = this.shared;
    const { targets } = this;
    if (targets.every((number) => String(shift[number]) === String(next))) return;
    this.put(shift.map((each, number) => (targets.includes(number) ? next : each)), gesture);
  }

  reset() {
    if (this.shared.shift.some((shift) => shift.some(Boolean))) this.put(this.shared.shift.map(() => [0, 0]));
  }

  put(shift, gesture = null) {
    this.about(gesture);
    this.shared.shift = shift;
    this.show();
    this.changed();
  }

  show() {
    const [dx, dy] = this.shared.shift[this.targets[0]];
    for (const [id, value] of [["dx", dx], ["dy", dy]]) if (document.activeElement !== $(id) || Number($(id).value) !== value) $(id).value = value;
    const place = (value) => `${50 + (45 * Math.max(-PAD, Math.min(PAD, value))) / PAD}%`;
    $("knob").style.left = place(dx);
    $("knob").style.top = place(dy);
  }
}
