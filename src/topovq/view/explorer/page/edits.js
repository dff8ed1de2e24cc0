// Edits as a list of steps, the same for every run, that undo takes back and a link holds:
//   ["i", set, index]                                the second image
//   ["m", right, down, ...]                          every token moves, two numbers a map
//   ["f", run, map, top, left, bottom, right, code, ...]   the region, in tokens of that run's map, gets one code in each run
//   ["x", run, map, top, left, bottom, right]        the region is exchanged with the second image

export const encodeEdits = (steps) => steps.map((step) => step.join(".")).join("_");

export function decodeEdits(text) {
  const number = (word) => (/^-?\d+$/.test(word) ? Number(word) : word);
  return text ? text.split("_").map((step) => step.split(".").map(number)) : [];
}

// The region of a step as shares of the image, [top, left, bottom, right], so that it means the same in every run.
function region(panels, [, run, map, top, left, bottom, right]) {
  const size = panels[run]?.info.maps[map];
  const inside = (low, high, most) => low >= 0 && low <= high && high < most;
  if (!size || !inside(top, bottom, size.height) || !inside(left, right, size.width)) throw new RangeError("region");
  return [top / size.height, left / size.width, (bottom + 1) / size.height, (right + 1) / size.width];
}

// Fill or exchange a region in all runs.
export function apply(step, panels) {
  const where = region(panels, step);
  if (step[0] === "x") {
    if (panels.some((panel) => !panel.work.second)) throw new RangeError("second image");
    panels.forEach((panel) => panel.exchange(where));
    return;
  }
  const codes = step.slice(7);
  panels.forEach((panel, number) => {
    const map = Math.min(step[2], panel.info.maps.length - 1);
    if (!(codes[number] >= 0 && codes[number] < panel.info.maps[map].codes)) throw new RangeError("code");
    panel.fill(where, map, codes[number]);
  });
}

// Do all steps of a link; gives those that could be done. `imageOf` finds the second image.
export async function replay(steps, panels, imageOf) {
  const done = [];
  for (const step of steps) {
    try {
      if (step[0] === "i") {
        const image = imageOf(step[1], step[2]);
        if (!image) throw new RangeError("image");
        await Promise.all(panels.map((panel) => panel.useSecond(image)));
      } else if (step[0] === "m") {
        if (!step.slice(1).every((places) => Math.abs(places) <= 99)) throw new RangeError("move");
        const pairs = Array.from({ length: (step.length - 1) / 2 }, (_, i) => step.slice(1 + 2 * i, 3 + 2 * i));
        await Promise.all(panels.map((panel) => panel.move(pairs)));
      } else if (step[0] === "f" || step[0] === "x") apply(step, panels);
      else throw new RangeError("kind");
    } catch (error) {
      if (error instanceof RangeError) return done;
      throw error;
    }
    done.push(step);
  }
  return done;
}
