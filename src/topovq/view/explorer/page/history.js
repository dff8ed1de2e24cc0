// Undo and redo: a stack of states, each whole. `read` gives the present one, `write` puts one back.
const MOST = 200;

export class History {
  constructor(read, write, changed) {
    Object.assign(this, { read, write, changed, past: [], future: [], gesture: null });
  }

  // To be called before a change. Changes of one gesture (a drag, a stroke) are undone together.
  about(gesture = null) {
    if (gesture !== null && gesture === this.gesture) return;
    this.gesture = gesture;
    this.past.push(this.read());
    if (this.past.length > MOST) this.past.shift();
    this.future = [];
    this.changed();
  }

  undo() {
    this.step(this.past, this.future);
  }

  redo() {
    this.step(this.future, this.past);
  }

  step(from, to) {
    if (!from.length) return;
    this.gesture = null;
    to.push(this.read());
    this.write(from.pop());
    this.changed();
  }
}
