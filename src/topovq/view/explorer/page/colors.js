// Colors of the map's views, and their legends.

const CORNERS = [[228, 87, 46], [243, 198, 35], [106, 63, 181], [23, 184, 144]]; // of the map: top left, top right, bottom ...
const RAMPS = {
  hits: [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]],
  distances: [[0, 0, 4], [81, 18, 124], [183, 55, 121], [252, 137, 97], [252, 253, 191]],
};

const mix = (a, b, share) => a.map((value, i) => value + (b[i] - value) * share);
const css = (color) => `rgb(${color.map(Math.round).join(" ")})`;

// The color of a place, both coordinates from 0 to 1.
export function placeColor(u, v) {
  return css(mix(mix(CORNERS[0], CORNERS[1], u), mix(CORNERS[2], CORNERS[3], u), v));
}

// The color of a share from 0 to 1 in a view.
export function rampColor(view, share) {
  const stops = RAMPS[view];
  const at = Math.max(0, Math.min(1, share)) * (stops.length - 1);
  const low = Math.min(stops.length - 2, Math.floor(at));
  return css(mix(stops[low], stops[low + 1], at - low));
}

// Fill the legend of a view: a scale with its two ends, or a sentence where colors are places or pictures.
export function legend(element, view, data) {
  const [scale, low, high] = ["scale", "low", "high"].map((name) => element.querySelector(`.${name}`));
  const ramp = RAMPS[view];
  scale.className = `scale ${view}`;
  if (ramp) {
    scale.style.background = `linear-gradient(90deg, ${ramp.map(css).join(", ")})`;
    const most = data[view].reduce((a, b) => Math.max(a, b), 0);
    low.textContent = view === "hits" ? "never used" : "0: the same";
    high.textContent = view === "hits" ? `${most.toLocaleString("en")} times (log scale)` : `${most.toPrecision(3)} apart`;
  } else if (view === "colors") {
    const [tl, tr, bl, br] = CORNERS.map(css);
    scale.style.background =
      `linear-gradient(90deg, ${tl}, ${tr}) top / 100% 50% no-repeat, linear-gradient(90deg, ${bl}, ${br}) bottom / 100% 50% no-repeat`;
    low.textContent = "A color is a place on the map: tokens of similar color are close.";
    high.textContent = "";
  } else {
    scale.style.background = "";
    low.textContent = "Every code decoded, at its place. Neighbors should look alike.";
    high.textContent = "";
  }
}
