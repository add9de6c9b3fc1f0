// Search from disk. Browsers start no worker for a page that was opened from a file, so the search runs in an invisible frame of the page in its place.
// (The theme's offline plugin would load such a script from the network; it takes this one for its name.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.early = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const room = this.frame.contentWindow;
      room.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = room.document.createElement("script");
      script.src = address;
      script.onload = () => {
        const early = this.early;
        this.early = null;
        early.forEach((data) => this.postMessage(data));
      };
      room.document.body.append(script);
    }
    postMessage(data) {
      if (this.early) this.early.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
