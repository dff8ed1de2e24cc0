// What one sees, in the address bar: #image=validation/3&shift=2,1&view=hits&edits=f.0.0.3.4.3.4.17

const KEYS = ["image", "shift", "map", "view", "tool", "pick", "edits"];

export function readLink() {
  return Object.fromEntries([...new URLSearchParams(location.hash.slice(1))].filter(([key]) => KEYS.includes(key)));
}

// Browsers limit how often an address may change, so a change waits for the next ones.
let waiting = null;
export function writeLink(read) {
  waiting ??= setTimeout(() => {
    waiting = null;
    const others = [...new URLSearchParams(location.hash.slice(1))].filter(([key]) => !KEYS.includes(key));
    const told = Object.entries(read()).filter(([, value]) => value !== "");
    const text = new URLSearchParams([...others, ...told]).toString().replaceAll("%2F", "/").replaceAll("%2C", ",");
    history.replaceState(null, "", `#${text}`);
  }, 250);
}
