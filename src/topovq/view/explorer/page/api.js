// Requests to the server behind the page, and where the page says what happened.

export async function api(name, body) {
  const options = body && { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  let response;
  try {
    response = await fetch(`api/${name}`, options);
  } catch {
    throw new Error("The server cannot be reached; is `topovq explore` still running?");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.detail);
  return answer;
}

export function say(text, isError = false) {
  const status = document.getElementById("status");
  status.textContent = text;
  status.classList.toggle("error", isError);
}

// Runs a task again and again while it is asked for, one at a time: what is asked for meanwhile is done once, at the end.
export function latest(task) {
  let running = false;
  let wanted = false;
  return async function ask() {
    wanted = true;
    if (running) return;
    running = true;
    try {
      while (wanted) {
        wanted = false;
        await task();
      }
    } catch (error) {
      say(error.message, true);
    } finally {
      running = false;
    }
  };
}
