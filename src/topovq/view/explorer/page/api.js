// Requests to the server behind the page, and where the page says what happened.

async function send(name, body) {
  const options = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let response;
  try {
    response = await fetch(`api/${name}`, options);
  } catch {
    throw new Error("The server cannot be reached; is `topovq explore` still running?");
  }
  if (!response.ok) throw new Error((await response.json()).detail);
  return response;
}

export async function api(name, body) {
  return (await send(name, body)).json();
}

// Fetch a file and have the browser save it.
export async function saveAnswer(name, body, filename) {
  const address = URL.createObjectURL(await (await send(name, body)).blob());
  save(address, filename);
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

export function save(address, filename) {
  const link = document.createElement("a");
  link.href = address;
  link.download = filename;
  link.click();
}

export function say(text, isError = false) {
  const status = document.getElementById("status");
  status.textContent = text;
  status.classList.toggle("error", isError);
}

// Runs a task again and again while it is asked for, one at a time: what is asked for meanwhile is done once, at the end.
// `ask.idle()` is fulfilled when nothing is asked for any more; until then `element` is marked as busy.
export function latest(task, element = document.body) {
  let running = null;
  let wanted = false;
  async function work() {
    element.setAttribute("aria-busy", "true");
    try {
      while (wanted) {
        wanted = false;
        await task();
      }
    } catch (error) {
      say(error.message, true);
    } finally {
      running = null;
      element.removeAttribute("aria-busy");
    }
  }
  function ask() {
    wanted = true;
    running ??= work();
    return running;
  }
  ask.idle = async () => running;
  return ask;
}
